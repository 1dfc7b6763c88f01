"""The usage in a ledger at one moment.

In:    the names of the files with the sums of days, and the sums since the last snapshot.
Out:   sums by day, account, key and model.
Never: changes, whatever the ledger appends meanwhile.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mars_ray.errors import UnavailableError
from mars_ray.platform.usage.ledger_files import LedgerFiles
from mars_ray.platform.usage.usage_rows import UsageSums, add_up
from mars_ray.storage.location import store_errors


@dataclass(frozen=True, slots=True)
class LedgerView:
    """A copy of the state of a ledger. A ledger deletes the files of a view no sooner than `DELETE_S` later."""

    files: LedgerFiles
    days: Mapping[str, str]
    """Name of the file with the sums of each day."""
    pending: UsageSums
    """Sums that are in no file of a day yet."""

    def rows(self, first: str, last: str) -> UsageSums:
        """Return the sums of the days from `first` to `last`, such as 2026-11-25. Raises `UnavailableError`."""
        with store_errors(self.files.folder, UnavailableError, "the usage cannot be read in", "Repair the storage."):
            sums: UsageSums = {}
            for day_sums in self.files.days([name for day, name in self.days.items() if first <= day <= last]):
                add_up(sums, day_sums.items())
            add_up(sums, ((group, counts) for group, counts in self.pending.items() if first <= group.day <= last))
            return sums
