"""Read and write files of the pipelines: rows of a job, conversations for training, settings, Markdown tables."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pyarrow.dataset import dataset

from mars_ray.errors import ConfigError
from mars_ray.storage.whole_file import write_lines

Json = dict[str, Any]


def rows_in(job: Path) -> Iterator[Json]:
    """Yield the rows of a `generate` job."""
    for batch in dataset(job / "rows").to_batches():
        yield from batch.to_pylist()


def conversation(prompt: str, response: str) -> str:
    """Return a conversation as a line of input for `mars-ray train`."""
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return json.dumps({"messages": messages}, ensure_ascii=False)


def agree(path: Path, settings: Json) -> None:
    """Record the settings of a folder. Raises `ConfigError` if the folder was made with other settings."""
    if not path.exists():
        write(path, [json.dumps(settings)])
    for name, before in json.loads(path.read_text()).items():
        if name in settings and settings[name] != before:
            raise ConfigError(f"{path.parent}: {name} was {before}, now it is {settings[name]}. Give another --output.")


def write(path: Path, lines: Iterable[str]) -> None:
    """Write a file atomically, and create its folder if needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(path, lines)


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is aligned to the left."""
    rule = ["---", *("---:" for _ in head[1:])]
    return "".join("| " + " | ".join(line) + " |\n" for line in [head, rule, *lines])
