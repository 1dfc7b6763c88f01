"""Reject an input if none of its first rows can be answered, before starting a cluster and a model."""

from collections import Counter
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

from mars_ray.batch.rows.row_format import RowFormat
from mars_ray.data.records import parse_object
from mars_ray.errors import BadRecordError, DataError, PromptTooLongError, RequestError

FIRST_ROWS = 100
"""Maximum number of rows to check."""
ROW_BYTES = 1 << 20
"""Maximum size of a row to check. A longer row is left to a worker, because tokenizing it here could take minutes."""
REASONS = 3
"""Maximum number of reasons to show, most frequent first."""
COLUMNS = 12
"""Maximum number of columns to list."""


def check_first_rows(row_format: RowFormat, raws: Iterable[bytes], positions: int) -> None:
    """Raise `DataError` if none of the first rows can be answered. It names the most frequent reasons and the columns.

    `positions` is the context length of the model.
    """
    reasons = Counter[str]()
    columns: dict[str, None] = {}
    missing: dict[str, None] = {}
    for raw in islice(raws, FIRST_ROWS):
        if len(raw) > ROW_BYTES:
            return
        try:
            prompt = row_format.parse("first", raw).request.prompt
            if len(prompt) < positions:
                return
            raise PromptTooLongError(f"its prompt has {len(prompt)} tokens, more than the model's {positions}")
        except (BadRecordError, RequestError) as error:
            reasons[str(error).rstrip(".")] += 1
            missing |= dict.fromkeys(error.missing if isinstance(error, BadRecordError) else ())
        columns |= dict.fromkeys(_columns(raw))
    if reasons:
        raise DataError(_refusal(reasons, list(columns), list(missing)))


def _refusal(reasons: Counter[str], columns: list[str], missing: list[str]) -> str:
    count = reasons.total()
    rows = "the only row cannot" if count == 1 else f"none of the first {count} rows can"
    parts = [f"{rows} be answered."]
    parts += [f"{times} x {reason}." for reason, times in reasons.most_common(REASONS)]
    if columns:
        more = f" and {len(columns) - COLUMNS} more" if len(columns) > COLUMNS else ""
        parts.append(f"The columns are {', '.join(columns[:COLUMNS])}{more}.")
    parts.append(_hint(missing, columns) or "Correct the input, or name its column with --prompt-column.")
    return " ".join(parts)


def _hint(missing: list[str], columns: list[str]) -> str:
    """Return a hint that names a column similar to a missing one, or an empty string."""
    for name in missing:
        if close := get_close_matches(name, columns, n=1):
            return f"Did you mean {close[0]!r}?"
    return ""


def _columns(raw: bytes) -> list[str]:
    try:
        return list(parse_object(raw))
    except (BadRecordError, RecursionError):
        return []
