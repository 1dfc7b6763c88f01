"""Policies for comparison: two rules by which other engines set the draft length, and a fixed schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.policies.policy import Bounds, Decision, Policy

TABLE = ((0.25, 1.0), (0.5, 0.95), (0.75, 0.9))
"""Largest number of requests per slot for each threshold; above the last entry the threshold is the floor. vLLM has
such a table of batch sizes for the draft length (vllm-project/vllm PR 32374), with values from its users; these are
ours."""
EMA_WEIGHT = 0.2
EMA_TIERS = (1.0, 0.95, 0.9, 0.8, 0.7)
EMA_DOWN = 0.8
EMA_UP = 0.5
"""Thresholds fall by a tier above `EMA_DOWN` requests per slot and rise by a tier below `EMA_UP`, the hysteresis of
SGLang's adaptive drafting (sgl-project/sglang PR 21599)."""


def _decide_by_table(
    _plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], _state: None, _dt_s: float
) -> tuple[dict[str, Decision], None]:
    """Look up the threshold by the requests per slot."""
    occupancy = _occupancy(load)
    threshold = next((value for most, value in TABLE if occupancy <= most), 0.0)
    return {name: Decision(max(threshold, bound.floor), f"{occupancy:.2f}") for name, bound in bounds.items()}, None


@dataclass(frozen=True, slots=True)
class EmaState:
    """Moving average of the requests per slot, and the current tier."""

    average: float = 0.0
    tier: int = 0


def _decide_by_ema(
    _plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], state: EmaState, _dt_s: float
) -> tuple[dict[str, Decision], EmaState]:
    """Move one tier when the moving average leaves a band."""
    average = state.average + EMA_WEIGHT * (_occupancy(load) - state.average)
    tier = state.tier + (average > EMA_DOWN) - (average < EMA_UP)
    tier = min(max(tier, 0), len(EMA_TIERS) - 1)
    decisions = {name: Decision(max(EMA_TIERS[tier], bound.floor), f"{average:.2f}") for name, bound in bounds.items()}
    return decisions, EmaState(average, tier)


BATCH_TABLE = Policy(_decide_by_table, initial=None)
EMA_HYSTERESIS = Policy(_decide_by_ema, initial=EmaState())


def scheduled(thresholds: Sequence[float], window_s: float) -> Policy[float]:
    """Return a policy that follows a schedule with one threshold per window. Its state is the time."""

    def decide(
        _plan: ControlPlan, _load: ClusterLoad, bounds: Mapping[str, Bounds], now_s: float, dt_s: float
    ) -> tuple[dict[str, Decision], float]:
        # A decision at second s holds for the second after it.
        now_s += dt_s
        threshold = thresholds[min(int((now_s + 1) / window_s), len(thresholds) - 1)]
        return {name: Decision(max(threshold, bound.floor), "scheduled") for name, bound in bounds.items()}, now_s

    return Policy(decide, initial=0.0)


def _occupancy(load: ClusterLoad) -> float:
    return sum(load_of_class.running + load_of_class.waiting for load_of_class in load.classes) / max(1, load.rows)
