"""Six tasks: edits, extraction with a schema, summaries, tool calls, problems of GSM8K, and chat.

Edits use sources of Python's standard library; the other tasks use the licence-clean data in `../shared/data`.
"""

import gzip
import inspect
import json
import random
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

DATA = Path("../shared/data")

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Workload:
    """Conversations of one task."""

    name: str
    conversations: list[Messages]
    max_tokens: int
    schema: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


def workloads(count: int, seed: int = 0) -> list[Workload]:
    """Return all tasks with `count` conversations each."""
    draw = random.Random(seed)
    return [make(count, draw) for make in (edits, extraction, summaries, tool_calls, gsm8k, chat)]


def _records(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def _user(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def edits(count: int, draw: random.Random) -> Workload:
    """Rename a function in a file of about 60 lines and return the whole file."""
    import argparse
    import calendar
    import csv
    import difflib
    import fractions
    import heapq
    import json.encoder
    import shlex
    import statistics
    import string
    import textwrap

    modules: list[ModuleType] = [
        argparse, calendar, csv, difflib, fractions, heapq, json.encoder, shlex, statistics, string, textwrap,
    ]  # fmt: skip
    conversations: list[Messages] = []
    while len(conversations) < count:
        module = draw.choice(modules)
        lines = inspect.getsource(module).splitlines()
        start = draw.randrange(max(1, len(lines) - 60))
        part = lines[start : start + 60]
        names = [line.split("def ")[1].split("(")[0] for line in part if line.lstrip().startswith("def ")]
        if not names:
            continue
        name = draw.choice(names)
        request = (
            f"Rename the function `{name}` to `{name}_or_none` everywhere in this file. Answer with the whole file in "
            f"one code block and nothing else.\n\n```python\n" + "\n".join(part) + "\n```"
        )
        conversations.append(_user(request))
    return Workload("edits", conversations, 700)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "people": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "numbers": {"type": "array", "items": {"type": "number"}, "maxItems": 8},
        "first_sentence": {"type": "string", "maxLength": 300},
        "question": {"type": "string", "maxLength": 300},
    },
    "required": ["people", "numbers", "first_sentence", "question"],
    "additionalProperties": False,
}


def extraction(count: int, draw: random.Random) -> Workload:
    """Extract people, numbers, the first sentence and the question of a problem as JSON."""
    problems = draw.sample(_records("gsm8k/train.jsonl.gz"), count)
    text = "Extract people, numbers, the first sentence and the question from this text as JSON.\n\n"
    return Workload("extraction", [_user(text + each["question"]) for each in problems], 300, SCHEMA)


def summaries(count: int, draw: random.Random) -> Workload:
    """Summarise a passage of a tale."""
    passages = []
    for record in _records("instruct/train.jsonl.gz"):
        if record["source"] == "fairytaleqa":
            passages.append(record["messages"][0]["content"].split("\n\n")[1])
    passages = [passage for passage in dict.fromkeys(passages) if len(passage) > 600]
    return Workload(
        "summaries", [_user(f"Summarise in three sentences.\n\n{text}") for text in draw.sample(passages, count)], 150
    )


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"} for key in keys},
                "required": keys,
            },
        },
    }
    for name, description, keys in (
        ("find_flights", "Find flights between two cities.", ["origin", "destination", "date"]),
        ("book_flight", "Book a flight by its number.", ["flight_number", "passenger_name", "passenger_email"]),
        ("send_email", "Send an email.", ["recipient_email", "subject", "body"]),
    )
]


def tool_calls(count: int, draw: random.Random) -> Workload:
    """Call a tool in the sixth turn of a conversation."""
    conversations = []
    cities = ["Lisbon", "Oslo", "Vienna", "Dublin", "Athens", "Prague", "Madrid", "Zurich"]
    for _ in range(count):
        origin, destination, other = draw.sample(cities, 3)
        name = draw.choice(["Ada Byron", "Alan Mathison", "Grace Murray", "Edsger Wybe"])
        email = f"{name.split()[0].lower()}@example.org"
        turns: Messages = []
        for number, (city, day) in enumerate([(destination, 3), (other, 9)]):
            date = f"2027-05-{day:02d}"
            flight = f"MR{draw.randrange(100, 999)}"
            turns += [
                {"role": "user", "content": f"Find a flight from {origin} to {city} on {date} for {name}, {email}."},
                _call(f"call_{number}a", "find_flights", {"origin": origin, "destination": city, "date": date}),
                {"role": "tool", "tool_call_id": f"call_{number}a", "content": json.dumps([{"flight_number": flight}])},
                {"role": "assistant", "content": f"I found {flight}."},
                {"role": "user", "content": "Book it."},
                _call(
                    f"call_{number}b",
                    "book_flight",
                    {"flight_number": flight, "passenger_name": name, "passenger_email": email},
                ),
                {"role": "tool", "tool_call_id": f"call_{number}b", "content": '{"status": "booked"}'},
                {"role": "assistant", "content": f"{flight} is booked for {name}."},
            ]
        turns.append(
            {"role": "user", "content": f"Find a flight from {destination} to {origin} on 2027-05-21 and tell {email}."}
        )
        conversations.append(turns)
    return Workload("tool calls", conversations, 120, tools=TOOLS)


def _call(identifier: str, name: str, arguments: dict[str, str]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": identifier, "type": "function", "function": function}],
    }


def gsm8k(count: int, draw: random.Random) -> Workload:
    """Solve problems of GSM8K."""
    problems = draw.sample(_records("gsm8k/test.jsonl.gz"), count)
    return Workload("gsm8k", [_user(each["question"]) for each in problems], 250)


def chat(count: int, draw: random.Random) -> Workload:
    """Answer short requests of general kinds."""
    kinds = ("flan_cot", "tldr", "gpteacher_codegen", "openstax_prealgebra")
    records = [each for each in _records("instruct/val.jsonl.gz") if each["source"] in kinds]
    return Workload("chat", [each["messages"][:1] for each in draw.sample(records, count)], 200)
