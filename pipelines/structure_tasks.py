"""Make structure tasks of real text: text to put into JSON or a table, each with one correct answer.

    python -m pipelines.structure_tasks --instruct ../shared/data/instruct --output data/structure
    mars-ray evaluate --model smollm2 --tasks data/structure/heldout.jsonl --output out/structure

Four kinds: shell commands (tldr pages) into a JSON array or a Markdown table, dialogues (Taskmaster) and questions with
answers (FairytaleQA) into JSON. A line has `prompt` and `response` to learn from, `reference` and `match` to be
judged by: an answer is right when it is JSON of the same value, or the same table. The same input gives the same files.
"""

import argparse
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from mars_ray.data.record_file import check_source, read_records
from mars_ray.data.records import Message, parse_object, parse_record
from mars_ray.errors import EmptyDataError
from mars_ray.program import run_program
from pipelines.pipeline_files import Json, write

FILES = {"train": "train.jsonl.gz", "heldout": "val.jsonl.gz"}
RECORDS_AT_ONCE = 1024
SHARES = {"commands": 0.4, "table": 0.4, "turns": 0.15, "questions": 0.05}
"""Held-out tasks of each kind, as far as the text goes."""
ANSWER_CHARACTERS = 500
"""Longest answer in characters, about 150 tokens."""
PASSES = 8
"""Number of passes that combine the commands in a new order."""
COMMAND = re.compile(r"(?P<does>.+) with `(?P<tool>[^`]+)`\.")
SPEAKERS = {"user": "Customer", "assistant": "Barista"}

Row = dict[str, str]
"""An object of an array, or a line of a table."""


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instruct", type=Path, required=True, help="folder with train.jsonl.gz and val.jsonl.gz")
    parser.add_argument("--output", type=Path, default=Path("data/structure"))
    parser.add_argument("--train", type=int, default=4000, help="training tasks")
    parser.add_argument("--heldout", type=int, default=200, help="held-out tasks")
    given = parser.parse_args()
    for name, file in FILES.items():
        source = given.instruct / file
        made = tasks(conversations(source), vars(given)[name])
        if not made:
            raise EmptyDataError(f"{source} has no conversation from tldr, taskmaster4 or fairytaleqa.")
        write(given.output / f"{name}.jsonl", (json.dumps(each, ensure_ascii=False) for each in made))
        print(f"{given.output / name}.jsonl: {len(made)} tasks")


def conversations(source: Path) -> dict[str, list[Sequence[Message]]]:
    """Return the conversations of a file by source."""
    check_source(source)
    found: dict[str, list[Sequence[Message]]] = defaultdict(list)
    for chunk in read_records(source, RECORDS_AT_ONCE):
        for raw in chunk:
            found[str(parse_object(raw).get("source"))].append(parse_record(raw).messages)
    return found


def tasks(found: dict[str, list[Sequence[Message]]], count: int) -> list[Json]:
    """Return up to `count` different tasks in random order."""
    draw = random.Random(0)
    commands = [row for row in map(command, found["tldr"]) if row]
    stories = [rows for rows in map(questions, found["fairytaleqa"]) if rows]
    kinds = {
        "commands": (as_json("commands", rows, "{does} ({tool}): {command}") for rows in groups(commands, draw)),
        "table": (as_table(rows, "{command} - {does}") for rows in groups(commands, draw)),
        "turns": (as_json("turns", [*map(turn, each)], "{speaker}: {text}") for each in found["taskmaster4"]),
        "questions": (as_json("questions", rows, "Q: {question}\nA: {answer}") for rows in stories),
    }
    made: dict[str, Json] = {}
    for name, share in SHARES.items():
        of_kind = {each["prompt"]: each for each in kinds[name] if len(each["response"]) <= ANSWER_CHARACTERS}
        made |= islice(of_kind.items(), round(share * count))
    return draw.sample(list(made.values()), len(made))


def command(messages: Sequence[Message]) -> Row | None:
    """Return the description of one command on a tldr page, if it fits into a table."""
    asked = COMMAND.fullmatch(messages[0]["content"])
    answer = messages[1]["content"].strip("`")
    return None if asked is None or "|" in answer else {**asked.groupdict(), "command": answer}


def turn(message: Message) -> Row:
    """Return one turn of a dialogue."""
    return {"speaker": SPEAKERS[message["role"]], "text": message["content"].strip()}


def questions(messages: Sequence[Message]) -> list[Row]:
    """Return the questions on a story; the first one follows its text."""
    if not messages[0]["content"].startswith("Read the text and answer."):
        return []
    asked = [each["content"].rpartition("\n")[2] for each in messages if each["role"] == "user"]
    answers = [each["content"].strip() for each in messages if each["role"] == "assistant"]
    return [{"question": question, "answer": answer} for question, answer in zip(asked, answers, strict=True)]


def groups(rows: Sequence[Row], draw: random.Random) -> Iterator[list[Row]]:
    """Yield all items in random order, two or three at a time, again and again."""
    for _ in range(PASSES):
        left = iter(draw.sample(rows, len(rows)))
        while some := list(islice(left, draw.randint(2, 3))):
            yield some


def as_json(name: str, rows: Sequence[Row], line: str) -> Json:
    """Return the task to turn lines into a JSON array of objects."""
    keys = ", ".join(f'"{key}"' for key in rows[0])
    text = "\n".join(line.format(**row) for row in rows)
    answer = json.dumps(rows, ensure_ascii=False)
    return task(f"Write these {name} as a JSON array of objects with the keys {keys}.\n\n{text}", answer, "json")


def as_table(rows: Sequence[Row], line: str) -> Json:
    """Return the task to make a Markdown table of commands."""
    text = "\n".join(line.format(**row) for row in rows)
    body = [f"| `{row['command']}` | {row['tool']} | {row['does']} |" for row in rows]
    table = "\n".join(["| Command | Tool | What it does |", "| --- | --- | --- |", *body])
    return task(f"Write these commands as a Markdown table: command, tool, what it does.\n\n{text}", table, "exact")


def task(prompt: str, answer: str, match: str) -> Json:
    """Return a line of a file."""
    return {"prompt": prompt, "response": answer, "reference": answer, "match": match}


if __name__ == "__main__":
    run_program("structure_tasks", main)
