"""Refuse an input of whose first rows none can be asked, before a cluster and a model are started for it."""

import re
from collections import Counter
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

from mars_ray.batch.rows.row_format import RowFormat
from mars_ray.data.records import parse_object
from mars_ray.errors import BadRecordError, DataError, PromptTooLongError, RequestError

FIRST_ROWS = 100
"""Rows that are looked at, at most: the first that can be asked ends the search."""
REASONS = 3
"""Reasons that are shown, the commonest first."""
COLUMNS = 12
"""Columns that are listed."""


def check_first_rows(row_format: RowFormat, raws: Iterable[bytes], positions: int) -> None:
    """Raise `DataError` with the commonest reasons and the columns unless one of the first rows can be asked.

    `positions` is the length that a sequence of the model may have.
    """
    reasons, columns = Counter[str](), dict[str, None]()
    for raw in islice(raws, FIRST_ROWS):
        try:
            prompt = row_format.parse("first", raw).request.prompt
            if len(prompt) < positions:
                return
            raise PromptTooLongError(f"its prompt has {len(prompt)} tokens and a sequence may have {positions}")
        except (BadRecordError, RequestError) as error:
            reasons[str(error).rstrip(".")] += 1
        columns |= dict.fromkeys(_columns(raw))
    if reasons:
        raise DataError(_refusal(reasons, list(columns)))


def _refusal(reasons: Counter[str], columns: list[str]) -> str:
    count = reasons.total()
    what = "the only row cannot" if count == 1 else f"none of the first {count} rows can"
    parts = [f"{what} be answered."]
    parts += [f"{number} x {reason}." for reason, number in reasons.most_common(REASONS)]
    if columns:
        more = f" and {len(columns) - COLUMNS} more" if len(columns) > COLUMNS else ""
        parts.append(f"The columns are {', '.join(columns[:COLUMNS])}{more}.")
    parts.append(_hint(next(iter(reasons)), columns) or "Mend the input, or name its column by --prompt-column.")
    return " ".join(parts)


def _hint(reason: str, columns: list[str]) -> str:
    """Return the column that was meant by a name in the reason, if one is alike."""
    for name in re.findall("'([^']*)'", reason):
        if name not in columns and (close := get_close_matches(name, columns, n=1)):
            return f"Did you mean {close[0]!r}?"
    return ""


def _columns(raw: bytes) -> list[str]:
    try:
        return list(parse_object(raw))
    except (BadRecordError, RecursionError):
        return []
