"""How many masks are worth their positions in the next step.

In:    the live profile, the step-time model, the running sequences.
Out:   a block for each sequence.
Never: touches a request that fixes its block, or its seed: what comes out in threshold mode depends on the block.

A small batch leaves the processor idle while weights are read, so masks are nearly free; a large one pays for each
position. The block with the most expected tokens per second lies between 1, which is autoregressive decoding, and the
block the model was trained for. Before step times are known, large and small blocks take turns, to tell what a mask
costs from what a step does. Where few masks are fed, one sequence now and then gets all, so that profile and step time
go on learning.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from mars_ray.engine.profile import CALIBRATED_FORWARDS, Profile
from mars_ray.engine.sequence import Sequence
from mars_ray.engine.step_time import StepTime, StepTimeFit, best_block
from mars_ray.method.metric import Metric

CHOOSE_EVERY = 16
PROBE_EVERY = 16


class BlockChoice:
    """Chooses between 1 and `block`."""

    def __init__(self, profile: Profile, step_time: StepTimeFit, block: int) -> None:
        self._profile, self._step_time, self._full = profile, step_time, block
        self._chosen = block
        self._probe: Sequence | None = None
        self._steps = 0
        self._chosen_for: tuple[int | None, tuple[float, ...]] | None = None

    @property
    def chosen(self) -> int:
        """The block of a sequence that fixes nothing."""
        return self._chosen

    def next_step(self, running: list[Sequence], thresholds: Mapping[str, float], kv_tokens: int) -> None:
        """Choose for the next step, where the engine's own thresholds, by class of service, are `thresholds`."""
        self._steps += 1
        # A batch changes with every sequence that ends; what is best for it changes little below a factor of two.
        situation = ((len(running) - 1).bit_length() if running else None, tuple(thresholds.values()))
        if (model := self._step_time.model) is None:
            self._chosen = self._full >> self._steps % self._full.bit_length()
        elif self._steps % CHOOSE_EVERY == 0 or situation != self._chosen_for:
            self._chosen_for = situation
            self._chosen = self._choose(model, running, thresholds, kv_tokens)
        probes = self._chosen < self._full and running and self._steps % PROBE_EVERY == 0
        self._probe = running[self._steps // PROBE_EVERY % len(running)] if probes else None

    def block(self, sequence: Sequence) -> int:
        """Return the block of a sequence whose request names none."""
        return self._chosen if _adapts(sequence) and sequence is not self._probe else self._full

    def _choose(self, model: StepTime, running: list[Sequence], by_class: Mapping[str, float], kv_tokens: int) -> int:
        if self._profile.forwards < CALIBRATED_FORWARDS:
            return self._full  # what is accepted is not known either
        thresholds = Counter(
            each.request.decode.threshold_now(own)
            for each in running
            if _adapts(each) and each.request.decode.drafts(own := by_class[each.service_class])
        )
        if not thresholds:
            return self._chosen
        gained_K = np.sum([count * self._profile.survival(value) for value, count in thresholds.items()], axis=0)
        return best_block(model, gained_K, rows=len(running), drafting=thresholds.total(), kv_tokens=kv_tokens)


def _adapts(sequence: Sequence) -> bool:
    """Return whether nothing fixes the block; the profile knows thresholds on the probability only."""
    request = sequence.request
    return (
        request.sampling.seed is None and request.decode.block is None and request.decode.metric is Metric.PROBABILITY
    )
