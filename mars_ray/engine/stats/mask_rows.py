"""Measure how many masks drafts add to a forward, and how often masks are behind the wrong draft."""

from mars_ray.engine.stats.grid import KEEP_RECENT


class MaskRows:
    """Decayed counts of how forwards lay out their masks: one row behind the last token and one behind each draft."""

    def __init__(self) -> None:
        self._drafts = self._rows = 0.0
        """Drafts, and the masks that they added, the latter as fractions of the longest row."""
        self._surprised = self._void = 0.0
        """Forwards that found a wrong draft, and how many of these had no masks after the last right draft."""

    def observe(self, masks: tuple[int, ...], *, read: bool, surprised: bool) -> None:
        """Record a forward (see `Profile.observe_rows`)."""
        if drafts := len(masks) - 1:
            self._drafts = KEEP_RECENT * self._drafts + drafts
            self._rows = KEEP_RECENT * self._rows + (sum(masks) / max(masks) - 1)
        if surprised:
            self._surprised = KEEP_RECENT * self._surprised + 1
            self._void = KEEP_RECENT * self._void + (not read)

    @property
    def per_draft(self) -> float:
        """Number of masks that a draft adds, as a fraction of the longest row."""
        return self._rows / self._drafts if self._drafts else 0.0

    @property
    def unread(self) -> float:
        """Share of the forwards with a wrong draft that had no masks after the last right draft."""
        return self._void / self._surprised if self._surprised else 0.0
