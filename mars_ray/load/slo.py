"""SLO of a request: latency limits that the request must meet to count as good. A latency without a measurement misses
its limit."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mars_ray.errors import ConfigError
from mars_ray.load.record import RequestOutcome, RequestRecord

FIGURES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSlo:
    """Limits in milliseconds; None means no limit. In an open loop, ttft and e2e are measured from the arrival."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        """Return True if a request completed within all limits."""
        if record.outcome is not RequestOutcome.OK:
            return False
        tpot_s = record.tpot_s
        if record.completion_tokens in (0, 1):  # no second token to wait for
            tpot_s = 0.0
        figures = ((record.ttft_due_s, self.ttft_ms), (tpot_s, self.tpot_ms), (record.e2e_s, self.e2e_ms))
        return all(limit is None or (value is not None and 1000 * value <= limit) for value, limit in figures)


def parse_slo(texts: Iterable[str]) -> RequestSlo | None:
    """Return the limits in `texts`, or None if there are none. Raises `ConfigError` for an unusable limit."""
    limits: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, _, value = part.partition(":")
        if name not in FIGURES:
            raise ConfigError(f"slo {part!r} is unknown; give {', '.join(f'{figure}:MS' for figure in FIGURES)}.")
        if f"{name}_ms" in limits:
            raise ConfigError(f"slo {name} is given twice; give it once.")
        limits[f"{name}_ms"] = _milliseconds(part, value)
    return RequestSlo(**limits) if limits else None


def _milliseconds(part: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"slo {part!r} is not usable; after the colon give milliseconds above 0, such as ttft:200.")
    return value
