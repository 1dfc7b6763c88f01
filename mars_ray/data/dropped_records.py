"""Count the records that are dropped from a data set, and name the commonest reasons with the first record of each."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mars_ray.errors import DataError

MAX_DROPPED = 0.1
"""Default of the maximum share of the records that may be dropped."""
REASONS = 3
"""Number of reasons to keep and show, most frequent first."""
TEXT_MAX = 200
"""Maximum number of characters of a reason to show."""

_FIELD = re.compile(r"'([a-z_]{1,24})'")
_VALUE = re.compile(r""", (?:not|only) | but b['"]|[\[{(<"']""")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class DropReason:
    """A reason for which records were dropped."""

    text: str
    """Reason of the first record."""
    records: int
    """Number of records that were dropped for the same rule, perhaps with other values in their text."""
    first: int
    """Number of the first of these records, from 1. Blank lines have no number."""


class DroppedRecords:
    """Counts of dropped records by reason."""

    def __init__(self) -> None:
        self._reasons: dict[str, DropReason] = {}
        self.total = 0

    def add(self, text: str, record: int) -> None:
        """Count a record that was dropped for the reason `text`."""
        self.total += 1
        rule = rule_of(text)
        reason = self._reasons.get(rule) or DropReason(text[:TEXT_MAX], 0, record)
        self._reasons[rule] = replace(reason, records=reason.records + 1)

    def most_common(self) -> tuple[DropReason, ...]:
        """Return up to `REASONS` reasons, the most frequent first."""
        return tuple(sorted(self._reasons.values(), key=lambda reason: -reason.records)[:REASONS])

    def summary(self, source: str, records: int) -> str:
        """Return how many of the `records` of `source` were dropped, and why."""
        return dropped_summary(source, records, self.total, self.most_common())

    def check(self, source: str, records: int, max_dropped: float) -> None:
        """Raise `DataError` if more than this share of the `records` of `source` was dropped."""
        if self.total and self.total / records > max_dropped:
            raise DataError(
                f"{self.summary(source, records)}. That is {self.total / records:.1%}, and max_dropped allows "
                f"{max_dropped:.1%}. Correct the records, or raise max_dropped."
            )


def dropped_summary(source: str, records: int, dropped: int, reasons: Sequence[DropReason]) -> str:
    """Return a line such as "a.jsonl: 3 of 90 records dropped: 3 x it is longer than 512 tokens (first: record 4)"."""
    parts = [f"{reason.records:,} x {reason.text.rstrip('.')} (first: record {reason.first:,})" for reason in reasons]
    if others := dropped - sum(reason.records for reason in reasons):
        parts.append(f"{others:,} x for other reasons")
    return f"{source}: {dropped:,} of {records:,} records dropped" + (f": {', '.join(parts)}" if parts else "")


def rule_of(text: str) -> str:
    """Return the part of a reason that is the same in all records that break the same rule.

    It ends before the first value of the record, such as quoted text, and has no numbers. Names of fields stay.
    """
    with_fields = _FIELD.sub(r"`\1`", text)
    return _NUMBER.sub("N", _VALUE.split(with_fields, maxsplit=1)[0])
