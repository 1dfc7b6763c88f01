"""What the pipelines read and write: rows of a job, conversations to train on, settings of a folder."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pyarrow.dataset import dataset

from mars_ray.errors import ConfigError
from mars_ray.storage.whole_file import write_lines

Json = dict[str, Any]


def rows_in(job: Path) -> Iterator[Json]:
    """Yield the rows of a job of `generate`, a batch in memory at a time."""
    for batch in dataset(job / "rows").to_batches():
        yield from batch.to_pylist()


def conversation(prompt: str, response: str) -> str:
    """Return a line of JSON as `mars-ray train` reads it."""
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return json.dumps({"messages": messages}, ensure_ascii=False)


def agree(path: Path, settings: Json) -> None:
    """Refuse to go on with other settings than the folder was begun with."""
    if not path.exists():
        write(path, [json.dumps(settings)])
    for name, before in json.loads(path.read_text()).items():
        if settings[name] != before:
            raise ConfigError(f"{path.parent}: {name} was {before}, now it is {settings[name]}. Give another --output.")


def write(path: Path, lines: Iterable[str]) -> None:
    """Write a file whole or not at all, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_lines(path, lines)
