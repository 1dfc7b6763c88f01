"""Make structure tasks from real text: text to turn into JSON or a table, with one correct answer each.

    python -m pipelines.structure_tasks --instruct ../shared/data/instruct --output data/structure
    mars-ray evaluate --model smollm2 --tasks data/structure/heldout.jsonl --output out/structure

There are four kinds: shell commands (tldr pages) become a JSON array or a Markdown table, and dialogues (Taskmaster)
and questions with answers (FairytaleQA) become JSON. Each line has `prompt` and `response` for training, and
`reference` and `match` for evaluation: an answer is correct if it is JSON with the same value, or the same table. The
same input always gives the same files.
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
"""Share of each kind in the tasks, if there is enough text."""
ANSWER_CHARACTERS = 500
"""Maximum characters of an answer, about 150 tokens."""
PASSES = 8
"""Number of passes over the commands, each in a new order."""
COMMAND = re.compile(r"(?P<does>.+) with `(?P<tool>[^`]+)`\.")
SPEAKERS = {"user": "Customer", "assistant": "Barista"}

Row = dict[str, str]
"""An object in an array, or a line of a table."""


def main() -> None:
    """Write the training tasks and the held-out tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instruct", type=Path, required=True, help="folder with train.jsonl.gz and val.jsonl.gz")
    parser.add_argument("--output", type=Path, default=Path("data/structure"))
    parser.add_argument("--train", type=int, default=4000, help="number of training tasks")
    parser.add_argument("--heldout", type=int, default=200, help="number of held-out tasks")
    args = parser.parse_args()
    for name, file in FILES.items():
        source = args.instruct / file
        records = tasks(conversations(source), vars(args)[name])
        if not records:
            raise EmptyDataError(f"{source} has no conversation from tldr, taskmaster4 or fairytaleqa.")
        write(args.output / f"{name}.jsonl", (json.dumps(record, ensure_ascii=False) for record in records))
        print(f"{args.output / name}.jsonl: {len(records)} tasks")


def conversations(source: Path) -> dict[str, list[Sequence[Message]]]:
    """Return the conversations of a file by source."""
    check_source(source)
    by_source: dict[str, list[Sequence[Message]]] = defaultdict(list)
    for chunk in read_records(source, RECORDS_AT_ONCE):
        for raw in chunk:
            by_source[str(parse_object(raw).get("source"))].append(parse_record(raw).messages)
    return by_source


def tasks(by_source: dict[str, list[Sequence[Message]]], count: int) -> list[Json]:
    """Return up to `count` distinct tasks in random order."""
    draw = random.Random(0)
    commands = [row for row in map(command, by_source["tldr"]) if row]
    stories = [rows for rows in map(questions, by_source["fairytaleqa"]) if rows]
    kinds = {
        "commands": (as_json("commands", rows, "{does} ({tool}): {command}") for rows in groups(commands, draw)),
        "table": (as_table(rows, "{command} - {does}") for rows in groups(commands, draw)),
        "turns": (
            as_json("turns", [*map(turn, dialogue)], "{speaker}: {text}") for dialogue in by_source["taskmaster4"]
        ),
        "questions": (as_json("questions", rows, "Q: {question}\nA: {answer}") for rows in stories),
    }
    chosen: dict[str, Json] = {}
    for name, share in SHARES.items():
        of_kind = {record["prompt"]: record for record in kinds[name] if len(record["response"]) <= ANSWER_CHARACTERS}
        chosen |= islice(of_kind.items(), round(share * count))
    return draw.sample(list(chosen.values()), len(chosen))


def command(messages: Sequence[Message]) -> Row | None:
    """Return description, tool and command from a conversation on a tldr page; None if they do not fit into a table."""
    match = COMMAND.fullmatch(messages[0]["content"])
    answer = messages[1]["content"].strip("`")
    return None if match is None or "|" in answer else {**match.groupdict(), "command": answer}


def turn(message: Message) -> Row:
    """Return one turn of a dialogue."""
    return {"speaker": SPEAKERS[message["role"]], "text": message["content"].strip()}


def questions(messages: Sequence[Message]) -> list[Row]:
    """Return the questions about a story; the first question follows the text of the story."""
    if not messages[0]["content"].startswith("Read the text and answer."):
        return []
    texts = [message["content"].rpartition("\n")[2] for message in messages if message["role"] == "user"]
    answers = [message["content"].strip() for message in messages if message["role"] == "assistant"]
    return [{"question": question, "answer": answer} for question, answer in zip(texts, answers, strict=True)]


def groups(rows: Sequence[Row], draw: random.Random) -> Iterator[list[Row]]:
    """Yield groups of two or three rows; each of `PASSES` passes uses all rows in a new random order."""
    for _ in range(PASSES):
        shuffled = iter(draw.sample(rows, len(rows)))
        while group := list(islice(shuffled, draw.randint(2, 3))):
            yield group


def as_json(name: str, rows: Sequence[Row], line: str) -> Json:
    """Return a task that turns lines into a JSON array of objects."""
    keys = ", ".join(f'"{key}"' for key in rows[0])
    text = "\n".join(line.format(**row) for row in rows)
    answer = json.dumps(rows, ensure_ascii=False)
    return task(f"Write these {name} as a JSON array of objects with the keys {keys}.\n\n{text}", answer, "json")


def as_table(rows: Sequence[Row], line: str) -> Json:
    """Return a task that turns commands into a Markdown table."""
    text = "\n".join(line.format(**row) for row in rows)
    body = [f"| `{row['command']}` | {row['tool']} | {row['does']} |" for row in rows]
    table = "\n".join(["| Command | Tool | What it does |", "| --- | --- | --- |", *body])
    return task(f"Write these commands as a Markdown table: command, tool, what it does.\n\n{text}", table, "exact")


def task(prompt: str, answer: str, match: str) -> Json:
    """Return a task as a line of a file."""
    return {"prompt": prompt, "response": answer, "reference": answer, "match": match}


if __name__ == "__main__":
    run_program("structure_tasks", main)
