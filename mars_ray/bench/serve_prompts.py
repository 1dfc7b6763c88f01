"""The prompts of a load, drawn from a file of them.

In:    JSONL (plain or gz) or parquet of rows with `prompt` or `messages`, as `generate` reads; a random source.
Out:   conversations in random order, or texts of about as many tokens as a trace says.
Never: makes words up: what a language model is bad at predicting, it decodes at another speed.
"""

import random
from collections.abc import Iterator, Sequence
from importlib.resources import files
from itertools import count, islice
from pathlib import Path

from mars_ray.data.record_file import check_source, read_records
from mars_ray.data.records import Message, parse_messages, parse_object
from mars_ray.errors import BadRecordError, DataError, EmptyDataError

Conversation = tuple[Message, ...]

READ_RECORDS = 256


def bundled_prompts() -> Path:
    """Return the file of prompts that comes with mars-ray."""
    return Path(str(files("mars_ray") / "assets" / "prompts.jsonl"))


def read_prompts(path: Path) -> list[Conversation]:
    """Read all prompts. Raises `DataError` naming the first record that is not usable."""
    check_source(path)
    numbers = count(1)
    prompts = [
        _conversation(path, number, raw)
        for chunk in read_records(path, READ_RECORDS)
        for number, raw in zip(islice(numbers, len(chunk)), chunk, strict=True)
    ]
    if not prompts:
        raise EmptyDataError(f"{path} holds no prompt.")
    return prompts


def conversations(prompts: Sequence[Conversation], random_source: random.Random) -> Iterator[Conversation]:
    """Yield prompts without end, each once before any comes again."""
    while True:
        yield from random_source.sample(prompts, len(prompts))


class Texts:
    """Text of any length: prompts in random order, one after another, the last one cut."""

    def __init__(self, prompts: Sequence[Conversation], random_source: random.Random) -> None:
        self._drawn = conversations(prompts, random_source)

    def of(self, words: int) -> str:
        """Return a text of `words` words, another one every time."""
        found: list[str] = []
        while len(found) < words:
            found += " ".join(message["content"] for message in next(self._drawn)).split()
        return " ".join(found[:words])


def _conversation(path: Path, number: int, raw: bytes) -> Conversation:
    try:
        fields = parse_object(raw)
        # Columns of parquet exist in every row: one that is null is one that is not there.
        messages = fields.get("messages")
        if messages is None:
            messages = [{"role": "user", "content": fields.get("prompt")}]
        parsed = parse_messages(messages)
        if not parsed[-1]["content"].strip():
            raise BadRecordError("its prompt is empty")
    except BadRecordError as error:
        raise DataError(f"{path}, record {number}: {error}. Each needs 'prompt' or 'messages'.") from None
    return parsed
