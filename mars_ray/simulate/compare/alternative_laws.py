"""What our policies are compared with: laws that others use for speculation, turned to the threshold, and a schedule.

None of these is a policy of the controller.
"""

from collections.abc import Mapping, Sequence

from mars_ray.control.laws.limits import Bounds
from mars_ray.control.laws.load import Load
from mars_ray.control.laws.policy import Aim, Law, Memory
from mars_ray.control.settings import ControlPlan

TABLE = ((0.25, 1.0), (0.5, 0.95), (0.75, 0.9))
"""Requests per row up to which a threshold holds; beyond the last it is the floor. vLLM has such tables of batch size
for the length of drafts (vllm-project/vllm PR 32374); like its users, we had to make one up."""
EMA_WEIGHT = 0.2
EMA_TIERS = (1.0, 0.95, 0.9, 0.8, 0.7)
EMA_DOWN, EMA_UP = 0.8, 0.5
"""Requests per row above which a tier is given up, and below which it is taken back: a hysteresis as SGLang's adaptive
drafting has for accept lengths (sgl-project/sglang PR 21599)."""


def batch_table(
    _plan: ControlPlan, now: Load, bounds: Mapping[str, Bounds], memory: Memory, _dt_s: float
) -> tuple[dict[str, Aim], Memory]:
    """Look the threshold up by how many requests there are."""
    occupancy = _occupancy(now)
    threshold = next((value for most, value in TABLE if occupancy <= most), 0.0)
    return {name: Aim(max(threshold, each.floor), f"{occupancy:.2f}") for name, each in bounds.items()}, memory


def ema_hysteresis(
    _plan: ControlPlan, now: Load, bounds: Mapping[str, Bounds], memory: Memory, _dt_s: float
) -> tuple[dict[str, Aim], Memory]:
    """Go a tier down or up when a moving average leaves a band."""
    average = memory.get("average", 0.0)
    average += EMA_WEIGHT * (_occupancy(now) - average)
    tier = int(memory.get("tier", 0.0)) + (average > EMA_DOWN) - (average < EMA_UP)
    tier = min(max(tier, 0), len(EMA_TIERS) - 1)
    aims = {name: Aim(max(EMA_TIERS[tier], each.floor), f"{average:.2f}") for name, each in bounds.items()}
    return aims, {"average": average, "tier": float(tier)}


def scheduled(thresholds: Sequence[float], window_s: float) -> Law:
    """Return the law that follows a schedule: an entry for each window from the start on."""

    def law(
        _plan: ControlPlan, _now: Load, bounds: Mapping[str, Bounds], memory: Memory, dt_s: float
    ) -> tuple[dict[str, Aim], Memory]:
        # A decision made at second s holds for the second that begins then.
        now_s = memory.get("now_s", 0.0) + dt_s
        threshold = thresholds[min(int((now_s + 1) / window_s), len(thresholds) - 1)]
        return {name: Aim(max(threshold, each.floor), "scheduled") for name, each in bounds.items()}, {"now_s": now_s}

    return law


def _occupancy(now: Load) -> float:
    return sum(each.running + each.waiting for each in now.classes) / max(1, now.rows)
