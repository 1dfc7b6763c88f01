"""How far a download is: the bars of huggingface_hub on a terminal, a plain line now and then elsewhere."""

from typing import Any

from huggingface_hub.utils import are_progress_bars_disabled
from huggingface_hub.utils import tqdm as HubBar

from mars_ray.progress import ProgressLine

WRITTEN = "huggingface_hub.snapshot_download"
"""What the library calls its bar of the bytes that were written, of all files together."""
MEGABYTE = 1_000_000


class DownloadBar(HubBar):  # type: ignore[misc]
    """A bar that `snapshot_download` takes as its `tqdm_class`."""

    def __init__(self, *args: Any, name: str | None = None, **settings: Any) -> None:
        # Left to itself it draws the bar over files without a terminal, too; None looks for one.
        super().__init__(*args, name=name, **{"disable": None} | settings)
        shown = self.disable and name == WRITTEN and not are_progress_bars_disabled(name)
        self._line = ProgressLine("download, MB", total=None) if shown else None
        self._bytes = 0

    def update(self, n: float | None = 1) -> None:
        """Count `n` more; without a terminal a line is printed when it is due."""
        super().update(n)
        self._bytes += int(n or 0)
        if self._line is not None:
            self._line.update(self._bytes // MEGABYTE, {}, -(-self.total // MEGABYTE))
