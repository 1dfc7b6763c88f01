"""An input file, with the columns that the names of its folders add to its rows.

Hive, Spark and DuckDB write the values of some columns into folder names, such as `lang=en/year=2026/part-0.parquet`.
All folders of this form directly above a file are its partitions. So the columns of a row depend on the file alone, and
not on the input that finds the file. Values are text: `01` stays `01`, and a new partition changes no earlier type.
"""

import codecs
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from urllib.parse import unquote

from mars_ray.data.record_file import read_records
from mars_ray.data.records import parse_object
from mars_ray.errors import BadRecordError
from mars_ray.storage.location import AnyPath

NULL = "__HIVE_DEFAULT_PARTITION__"
"""Folder name that stands for null."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file, and the columns that each of its rows has in addition to its own. A column of the row itself wins."""

    path: AnyPath
    partitions: Mapping[str, str | None] = field(default_factory=dict)
    is_answers: bool = False
    """Whether the rows are answers of a job. Their `threshold` is a result and no option, and rows after the first
    answer to a prompt get ids of their own."""

    def read(self, chunk_records: int) -> Iterator[list[bytes]]:
        """Yield the records in chunks, as JSON text. Raises `DataError` if the file is damaged."""
        chunks = read_records(self.path, chunk_records)
        if self.is_answers:
            chunks = (list(map(_as_input, chunk)) for chunk in chunks)
        if not self.partitions:
            return chunks
        start = json.dumps(dict(self.partitions))[:-1].encode()
        return ([_with_start(start, raw) for raw in chunk] for chunk in chunks)


def partitions_of(path: AnyPath) -> dict[str, str | None]:
    """Return the columns that the names of the folders directly above the file `path` stand for."""
    names = list(takewhile(_is_partition, (folder.name for folder in path.parents)))
    pairs = [map(_text, name.split("=", 1)) for name in reversed(names)]
    return {column: None if value == NULL else value for column, value in pairs}


def _is_partition(name: str) -> bool:
    return name.find("=") > 0


def _text(escaped: str) -> str:
    """Return a name without URL escapes. Bytes that are not UTF-8 are replaced, because rows are UTF-8."""
    return unquote(escaped.encode(errors="surrogateescape").decode(errors="replace"))


def _as_input(raw: bytes) -> bytes:
    """Return an answer of a job as a row for another job. A damaged line stays as it is; its parser reports it."""
    try:
        row = parse_object(raw)
    except BadRecordError:
        return raw
    row.pop("threshold", None)
    if row.get("sample") and "id" in row:
        row["id"] = f"{row['id']}#{row['sample']}"
    return json.dumps(row).encode()


def _with_start(start: bytes, raw: bytes) -> bytes:
    """Put columns in front of a row's own, which win because parsers take the last of several values.

    A row that is no JSON object stays as it is, so that its parser reports it.
    """
    text = raw.removeprefix(codecs.BOM_UTF8)
    if not text.startswith(b"{"):
        return raw
    rest = text[1:].lstrip()
    return start + (b"" if rest.startswith(b"}") else b", ") + rest
