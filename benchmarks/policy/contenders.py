"""List the contenders: fixed thresholds, policies of other engines, and the policies of the controller."""

from dataclasses import dataclass
from typing import Any

from benchmarks.policy.alternative_policies import BATCH_TABLE, EMA_HYSTERESIS
from benchmarks.policy.tables import OURS
from mars_ray.control.policies.policy import Policy
from mars_ray.engine.mode import DEFAULT_THRESHOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way of setting thresholds."""

    ceiling: float = DEFAULT_THRESHOLD
    alternative: Policy[Any] | None = None
    """Policy that replaces the one of the controller."""
    recover_s: float | None = None
    """Smoothing of the controller; None keeps its default. Alternatives do their own smoothing, if any."""
    policy: str = "fixed"
    ahead: bool = True
    """Look ahead; False decodes one token at a time."""


CONTENDERS: dict[str, Contender] = {
    "one token at a time": Contender(ahead=False),
    "fixed 1.0": Contender(),
    "fixed 0.99": Contender(ceiling=0.99),
    "fixed 0.98": Contender(ceiling=0.98),
    "fixed 0.95": Contender(ceiling=0.95),
    "fixed 0.9": Contender(ceiling=0.9),
    "fixed 0.8": Contender(ceiling=0.8),
    "fixed 0.7": Contender(ceiling=0.7),
    "batch table": Contender(alternative=BATCH_TABLE, recover_s=0.0),
    "EMA, hysteresis": Contender(alternative=EMA_HYSTERESIS, recover_s=0.0),
    OURS: Contender(policy="capacity"),
}
