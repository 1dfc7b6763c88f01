"""What our policies are compared with: those that others use for speculation, turned to the threshold; a schedule.

None of these is a policy of the controller.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mars_ray.control.cluster_load import ClusterLoad
from mars_ray.control.policies.bounds import Bounds
from mars_ray.control.policies.policy import Decision, Policy
from mars_ray.control.settings import ControlPlan

TABLE = ((0.25, 1.0), (0.5, 0.95), (0.75, 0.9))
"""Requests per row up to which a threshold holds; beyond the last it is the floor. vLLM has such tables of batch size
for the length of drafts (vllm-project/vllm PR 32374); like its users, we had to make one up."""
EMA_WEIGHT = 0.2
EMA_TIERS = (1.0, 0.95, 0.9, 0.8, 0.7)
EMA_DOWN, EMA_UP = 0.8, 0.5
"""Requests per row above which a tier is given up, and below which it is taken back: a hysteresis as SGLang's adaptive
drafting has for accept lengths (sgl-project/sglang PR 21599)."""


def _decide_by_table(
    _plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], _state: None, _dt_s: float
) -> tuple[dict[str, Decision], None]:
    """Look the threshold up by how many requests there are."""
    occupancy = _occupancy(load)
    threshold = next((value for most, value in TABLE if occupancy <= most), 0.0)
    return {name: Decision(max(threshold, each.floor), f"{occupancy:.2f}") for name, each in bounds.items()}, None


@dataclass(frozen=True, slots=True)
class EmaState:
    """The moving average, and the tier it led to."""

    average: float = 0.0
    tier: int = 0


def _decide_by_ema(
    _plan: ControlPlan, load: ClusterLoad, bounds: Mapping[str, Bounds], state: EmaState, _dt_s: float
) -> tuple[dict[str, Decision], EmaState]:
    """Go a tier down or up when a moving average leaves a band."""
    average = state.average + EMA_WEIGHT * (_occupancy(load) - state.average)
    tier = state.tier + (average > EMA_DOWN) - (average < EMA_UP)
    tier = min(max(tier, 0), len(EMA_TIERS) - 1)
    decisions = {name: Decision(max(EMA_TIERS[tier], each.floor), f"{average:.2f}") for name, each in bounds.items()}
    return decisions, EmaState(average, tier)


BATCH_TABLE = Policy(_decide_by_table, initial=None)
EMA_HYSTERESIS = Policy(_decide_by_ema, initial=EmaState())


def scheduled(thresholds: Sequence[float], window_s: float) -> Policy[float]:
    """Return the policy that follows a schedule: an entry for each window from the start on. Its state is the time."""

    def decide(
        _plan: ControlPlan, _load: ClusterLoad, bounds: Mapping[str, Bounds], now_s: float, dt_s: float
    ) -> tuple[dict[str, Decision], float]:
        # A decision made at second s holds for the second that begins then.
        now_s += dt_s
        threshold = thresholds[min(int((now_s + 1) / window_s), len(thresholds) - 1)]
        return {name: Decision(max(threshold, each.floor), "scheduled") for name, each in bounds.items()}, now_s

    return Policy(decide, initial=0.0)


def _occupancy(load: ClusterLoad) -> float:
    return sum(each.running + each.waiting for each in load.classes) / max(1, load.rows)
