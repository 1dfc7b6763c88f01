"""Rows of a batch's input file, and the check of the whole file before any row runs.

In:    the lines of a file.
Out:   rows; or OpenAI's list of errors with line numbers.
Never: holds more than one line, or reads a line beyond its maximum length.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

from openai.types.batch_error import BatchError

from mars_ray.chat.nesting import LEVELS, is_nested_too_deeply
from mars_ray.chat.unicode_text import text_fault
from mars_ray.chat.validation_errors import NAME_CHARS

ERRORS_MAX = 50
"""Maximum number of errors in the list."""
MODEL_CHARS = 512
"""Maximum characters of a model's name that are kept; no model has a longer one."""
LINE_EXTRA_BYTES = 4096
"""Maximum bytes of a line besides its body."""
FIELDS = frozenset(("custom_id", "method", "url", "body"))


class BatchRow(NamedTuple):
    """One row of a batch."""

    key: bytes
    """Key of 16 bytes in the ledger."""
    custom_id: str
    model: str | None
    """The name of a model or adapter in the body."""
    line: bytes
    """The whole line. It is parsed only when the row runs, because a parsed body takes several times as many bytes."""

    def body(self) -> dict[str, Any]:
        """Parse the line, and return its body."""
        body: dict[str, Any] = json.loads(self.line)["body"]
        return body


@dataclass(frozen=True, slots=True)
class InputCheck:
    """Outcome of the check of an input file."""

    errors: tuple[BatchError, ...]
    """Reasons why the batch fails, in the order of the lines; empty if the batch can run."""
    rows: int
    model: str | None
    """Model of the first row that names one."""


def check_input(file: IO[bytes], url: str, *, max_rows: int, max_body_bytes: int) -> InputCheck:
    """Check all lines of a file whose rows must call `url`."""
    errors: list[BatchError] = []
    seen = set[bytes]()
    rows = 0
    model: str | None = None
    for number, line in _lines(file, max_body_bytes + LINE_EXTRA_BYTES):
        rows += 1
        if rows > max_rows:
            errors.append(_error("too_many_rows", f"the file has more than {max_rows} rows. Split it.", number))
            break
        checked = _check_line(line, url, number)
        if isinstance(checked, BatchRow):
            if checked.key in seen:
                shown = checked.custom_id[:NAME_CHARS]
                checked = _error("duplicate_custom_id", f"custom_id {shown!r} is used twice.", number, "custom_id")
            else:
                seen.add(checked.key)
                model = model or checked.model
        if isinstance(checked, BatchError):
            errors.append(checked)
            if len(errors) == ERRORS_MAX:
                break
    if not rows:
        errors.append(_error("empty_file", "the file has no rows.", None))
    return InputCheck(tuple(errors), rows, model)


def rows_of(file: IO[bytes], url: str, *, max_body_bytes: int) -> Iterator[BatchRow]:
    """Yield the rows of a file that `check_input` found right."""
    for number, line in _lines(file, max_body_bytes + LINE_EXTRA_BYTES):
        row = _check_line(line, url, number)
        if isinstance(row, BatchRow):
            yield row


def _lines(file: IO[bytes], max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number, from 1, and the content of each line that is not blank. The content of a line that is too long
    is None."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 16)
            yield number, None
        elif line.strip():
            yield number, line


def _check_line(line: bytes | None, url: str, number: int) -> BatchRow | BatchError:
    if line is None:
        return _error("line_too_long", "the line is longer than a request to the endpoint may be.", number)
    try:
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError
    except (ValueError, RecursionError):
        return _error("invalid_json_line", "the line is not a JSON object in UTF-8.", number)
    if is_nested_too_deeply(line, fields):
        return _error("invalid_json_line", f"the line is nested more than {LEVELS} levels deep.", number)
    if missing := sorted(FIELDS - fields.keys()):
        return _error("missing_required_parameter", f"the row has no {missing[0]!r}.", number, missing[0])
    if unknown := sorted(fields.keys() - FIELDS):
        return _error("unknown_parameter", f"the row has an unknown field {unknown[0][:NAME_CHARS]!r}.", number)
    custom_id = fields["custom_id"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= 512 or text_fault(custom_id):
        return _error("invalid_custom_id", "custom_id must be a text of 1 to 512 characters.", number, "custom_id")
    if fields["method"] != "POST":
        return _error("invalid_method", "method must be 'POST'.", number, "method")
    if fields["url"] != url:
        return _error("mismatched_url", f"url must be {url!r}, the endpoint of the batch.", number, "url")
    if not isinstance(fields["body"], dict):
        return _error("invalid_body", "body must be a JSON object.", number, "body")
    name = fields["body"].get("model")
    model = name[:MODEL_CHARS] if isinstance(name, str) else None
    return BatchRow(hashlib.blake2b(custom_id.encode(), digest_size=16).digest(), custom_id, model, line)


def _error(code: str, message: str, line: int | None, param: str | None = None) -> BatchError:
    return BatchError(code=code, message=message, line=line, param=param)
