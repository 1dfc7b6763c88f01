"""Count the right answers of a running endpoint to requests with tools.

    mars-ray serve --model bundled
    python -m benchmarks.tool_calls --requests 100 --json benchmarks/results/DATE-tool-calls.json

Requests are held-out examples of the family `tool_call`, each with its tools, decoded greedily. The family's verifier
judges the calls, or the text where no call is right. With `--tool-choice required` only examples that need a call are
sent. The deviation is that between samples with different seeds.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import openai

from mars_ray.chat.call_format import CALL_FORMATS
from mars_ray.cli.shared import write_json
from mars_ray.data.tasks import FAMILIES, TaskExample, examples, is_right_answer
from mars_ray.measure import machine
from mars_ray.program import run_program

TASK = "tool_call"
HERMES = CALL_FORMATS["hermes"]
MAX_TOKENS = 128
TAGS = re.compile(r"<\w+>\n(.*)\n</\w+>")
"""The tags around a call or its result."""


def main() -> None:
    """Send the requests, print the shares of right answers, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--seeds", type=int, default=3, help="samples of --requests examples each")
    parser.add_argument("--tool-choice", choices=("auto", "required"), default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    shares: list[float] = []
    with openai.OpenAI(base_url=arguments.url, api_key="none") as client:
        for seed in range(arguments.seeds):
            judged: list[bool] = []
            for example in islice(sample(seed, arguments.tool_choice), arguments.requests):
                body = request_body(example, arguments.model) | {"extra_body": {"threshold": arguments.threshold}}
                body |= {"tool_choice": arguments.tool_choice, "max_tokens": MAX_TOKENS, "temperature": 0.0}
                message = client.chat.completions.create(**body).choices[0].message
                judged.append(is_right_answer(TASK, example.answer, answer_text(message)))
                asked[kind_of(example)] += 1
                right[kind_of(example)] += judged[-1]
            shares.append(mean(judged))
    report = {
        "command": f"python -m benchmarks.tool_calls --model {arguments.model} --requests {arguments.requests} "
        f"--seeds {arguments.seeds} --threshold {arguments.threshold} --tool-choice {arguments.tool_choice}",
        "machine": machine(),
        "requests": asked.total(),
        "right": mean(shares),
        "right_deviation": stdev(shares) if len(shares) > 1 else None,
        "by_kind": {kind: {"requests": count, "right": right[kind]} for kind, count in sorted(asked.items())},
    }
    print(json.dumps(report, indent=2))
    write_json(arguments.json, report)


def sample(seed: int, tool_choice: str) -> Iterator[TaskExample]:
    """Yield held-out examples; with `required`, those whose right answer is a call."""
    for example in examples(FAMILIES[TASK], "heldout", seed):
        if tool_choice == "auto" or kind_of(example) == "call":
            yield example


def request_body(example: TaskExample, model: str) -> dict[str, Any]:
    """Return the request of an example, in the form in which clients of OpenAI's API send tools, calls and results."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": example.prompt}]
    for message in example.after:
        content = TAGS.sub(r"\1", message["content"])
        if message["role"] == "user":
            messages.append({"role": "tool", "content": content, "tool_call_id": "call_1"})
            continue
        call = json.loads(content)
        function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
        tool_call = {"id": "call_1", "type": "function", "function": function}
        messages.append({"role": "assistant", "content": None, "tool_calls": [tool_call]})
    tools = [{"type": "function", "function": tool} for tool in example.tools]
    return {"model": model, "messages": messages, "tools": tools}


def kind_of(example: TaskExample) -> str:
    """Return the kind of answer that is right: a call, a sentence after a result, or a text without any call."""
    if example.after:
        return "result"
    return "call" if example.response.startswith(HERMES.marker) else "text"


def answer_text(message: Any) -> str:
    """Return an answer in the form in which the model writes it; arguments may be cut off and so no JSON."""
    functions = [call.function for call in message.tool_calls or ()]
    calls = [HERMES.head + called.name + HERMES.middle + called.arguments + HERMES.tail for called in functions]
    return (message.content or "") + (HERMES.begin + HERMES.separator.join(calls) if calls else "")


if __name__ == "__main__":
    run_program("tool_calls", main)
