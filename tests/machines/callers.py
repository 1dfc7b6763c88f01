"""Callers of an endpoint, as a program for a machine: so many at once, each with one request after the other.

Prints a line for each answer as it comes: the second at which it was asked for, the seconds it took, and its status.
With `--stream` they read long greedy streams, and the line ends with the longest pause in seconds. `event:CODE` is the
status of a stream that ended with an error event, `differs` of one whose text is not that of an earlier one.
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
TEXTS: dict[int, list[str]] = {}
"""Texts of whole streams, by the number of their prompt."""


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
            pauses_s = [0.0]
            status = ask(given.urls[count % len(given.urls)], given.key, count % 16, given.stream, pauses_s)
            took_s = time.time() - asked_s
            line = f"{asked_s:.2f} {took_s:.2f} {status} {max(pauses_s):.2f}\n"
            print(line, end="", flush=True)  # one write, not two
            count += 1
            if status != "200":
                time.sleep(0.2)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(given.callers)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()


def ask(url: str, key: str, count: int, stream: bool, pauses_s: list[float]) -> str:
    """Return the status of an answer, or the error that came instead. Notes the pauses between events of a stream."""
    said = f"Ann, {count}: put them in a list."
    body: dict[str, Any] = {"model": "bundled", "messages": [{"role": "user", "content": said}]}
    if stream:
        body |= {"stream": True, "mode": "ar", "ignore_eos": True, "max_tokens": STREAMED_TOKENS}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            if stream:
                return end_of(answer, pauses_s, TEXTS.setdefault(count, []))
            json.loads(answer.read())["choices"][0]["message"]["content"]
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return f"{error.code}:{json.loads(error.read())['error']['message']}".replace(" ", "_")
    except (OSError, ValueError, LookupError, HTTPException) as error:
        return type(getattr(error, "reason", error)).__name__


def end_of(answer: HTTPResponse, pauses_s: list[float], texts: list[str]) -> str:
    """Read a stream and return how it ended. `texts` holds the whole texts of earlier streams for the same prompt."""
    last = text = ""
    at_s = time.time()
    for line in answer:
        pauses_s.append(time.time() - at_s)
        at_s = time.time()
        last = line.decode().strip().removeprefix("data: ") or last
        if line.startswith(b"data: {"):
            for choice in json.loads(last).get("choices", ()):
                text += choice["delta"].get("content") or ""
    if last == "[DONE]":
        texts.append(text)
        return str(answer.status) if text == texts[0] else "differs"
    error = json.loads(last).get("error")
    return f"event:{error['code']}" if error else "cut"


def parsed(lines: Sequence[str]) -> list[tuple[float, float, str, float]]:
    """Return second, seconds taken, status and longest pause of each line that was printed."""
    return [(float(asked), float(took), status, float(pause)) for asked, took, status, pause in map(str.split, lines)]


if __name__ == "__main__":
    main()
