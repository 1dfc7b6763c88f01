"""Figures of all batches of an endpoint, which the runner publishes in the storage for the gateways' metrics.

In:    counts by the drivers of batches; the batches that have not ended.
Out:   one object in the storage, which any gateway reads.
Never: makes a gateway list the storage: the runner alone does, so each figure exists once in an endpoint.
"""

from collections import Counter

from pydantic import BaseModel, ConfigDict, ValidationError

from mars_ray.errors import DataError
from mars_ray.platform.batches.storage_paths import BatchFolders, read_json, write_json

FIGURES = "figures.json"
FIGURES_S = 20.0
"""Seconds between two publications."""
STALE_S = 120.0
"""Age in seconds at which figures are no longer shown."""


WAITING = "waiting"
"""Status in the figures of a batch that no driver works on."""


class BatchFigures(BaseModel):
    """Figures at one moment. The counts of what has ended begin at 0 when the runner starts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unix_s: float
    """Unix time of the publication, in seconds."""
    unfinished: dict[str, int] = {}
    """Batches that have not ended, by status, or `WAITING`."""
    rows_left: int = 0
    """Rows of unfinished batches that are not done, without batches whose file has not been checked yet."""
    deadline_unix_s: float | None = None
    """Unix time of the earliest deadline of an unfinished batch, in seconds."""
    ended: dict[str, int] = {}
    """Batches that ended since the runner started, by status."""
    rows: dict[str, int] = {}
    """Rows that were done since the runner started, by outcome: `completed` or `failed`."""
    file_bytes: int = 0
    """Bytes of the files of all owners, results included."""


class BatchCounts:
    """Counts of batches and rows that the drivers of one runner have ended since it started."""

    def __init__(self) -> None:
        self.ended = Counter[str]()
        """Batches by the status with which they ended."""
        self.rows = Counter[str](completed=0, failed=0)


class FiguresFile:
    """The object in the storage. Methods block, and raise `UnavailableError` if the storage does not answer."""

    def __init__(self, folders: BatchFolders) -> None:
        self._path = folders.root / FIGURES

    def write(self, figures: BatchFigures) -> None:
        """Replace the figures."""
        write_json(self._path, figures.model_dump(mode="json"))

    def read(self, now_s: float) -> BatchFigures | None:
        """Return the figures; None if no runner has published any in the `STALE_S` seconds before the Unix time
        `now_s`, or if they are damaged."""
        try:
            figures = BatchFigures.model_validate(read_json(self._path))
        except (DataError, ValidationError):  # the runner replaces them within seconds
            return None
        return figures if now_s - figures.unix_s < STALE_S else None
