"""Callers of an endpoint, as a program for a machine: so many at once, each with one request after the other.

Prints a line for each answer as it comes: the second at which it was asked for, the seconds it took, and its status.
With `--stream` they read long streams; `event:CODE` is the status of one that ended with an error event.
"""

import argparse
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException, HTTPResponse
from typing import Any

PATIENCE_S = 60
STREAMED_TOKENS = 600


def main() -> None:
    """Ask until it is time to end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("urls", nargs="+", help="asked in turn")
    parser.add_argument("--key", required=True)
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--stream", action="store_true")
    given = parser.parse_args()
    began_s = time.time()

    def call(number: int) -> None:
        count = number
        while (asked_s := time.time()) < began_s + given.seconds:
            status = ask(given.urls[count % len(given.urls)], given.key, count, given.stream)
            print(f"{asked_s:.2f} {time.time() - asked_s:.2f} {status}\n", end="", flush=True)  # one write, not two
            count += 1
            if status != "200":
                time.sleep(0.2)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(given.callers)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()


def ask(url: str, key: str, count: int, stream: bool) -> str:
    """Return the status of an answer, or the error that came instead."""
    said = f"Ann, {count}: put them in a list."
    body: dict[str, Any] = {"model": "bundled", "messages": [{"role": "user", "content": said}]}
    if stream:
        body |= {"stream": True, "mode": "ar", "ignore_eos": True, "max_tokens": STREAMED_TOKENS}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            if stream:
                return end_of(answer)
            json.loads(answer.read())["choices"][0]["message"]["content"]
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return f"{error.code}:{json.loads(error.read())['error']['message']}".replace(" ", "_")
    except (OSError, ValueError, LookupError, HTTPException) as error:
        return type(getattr(error, "reason", error)).__name__


def end_of(answer: HTTPResponse) -> str:
    """Read a stream; return how it ended."""
    last = ""
    for line in answer:
        last = line.decode().strip().removeprefix("data: ") or last
    if last == "[DONE]":
        return str(answer.status)
    error = json.loads(last).get("error")
    return f"event:{error['code']}" if error else "cut"


def parsed(lines: Sequence[str]) -> list[tuple[float, float, str]]:
    """Return second, seconds taken and status of each line that was printed."""
    return [(float(asked), float(took), status) for asked, took, status in map(str.split, lines)]


if __name__ == "__main__":
    main()
