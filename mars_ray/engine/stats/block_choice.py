"""How many masks are worth their positions in the next step.

A small batch leaves the processor idle while weights are read, so masks are nearly free; a large one pays for each
position. The block with the most expected tokens per second, by the live profile and the step-time model, lies between
1, which is autoregressive decoding, and the block the model was trained for. Before step times are known, large and
small blocks take turns, to tell what a mask costs from what a step does. Where drafts are verified, it also lays
out the masks: behind the last draft alone, which takes the fewest positions, or behind every draft, so that a wrong one
does not void them. Where few masks are fed, one sequence now and
then gets all, so that profile and step time go on learning, at a small part of the time. What a mask costs is told by
whole steps only, for it falls with their number and includes all that the engine does with them besides the forward:
one step now and then is of the other kind, without masks or with masks for all, the more often the nearer it comes.

A request that fixes its block is left alone, and so is one that fixes its seed while tokens ahead are trusted: what
comes out depends on the block then.
"""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from mars_ray.engine.request import Acceptance
from mars_ray.engine.scheduling.scheduler import NO_MASKS, Masks
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.stats.lookahead import Floats
from mars_ray.engine.stats.profile import CALIBRATED_FORWARDS, Profile
from mars_ray.engine.stats.step_time import CLOCK_S, StepTime, StepTimeFit, StepWork, block_rates
from mars_ray.method.metric import Metric

CHOOSE_EVERY = 16
PROBE_EVERY = 16
"""Steps, and times the length of a step, between two that try something else, at least."""
PROBE_SHARE = 0.005
"""Part of the time that trying something else may cost at most, by what is known."""
ROWS_MOST = 63
"""Masks of one sequence in a step, where there are several rows: what a mask attends to is told by as many bits."""

AcceptanceOf = Callable[[Sequence], Acceptance | None]


class BlockChoice:
    """Chooses between 1 and `block`."""

    def __init__(self, profile: Profile, step_time: StepTimeFit, block: int) -> None:
        self._profile, self._step_time, self._full = profile, step_time, block
        self._chosen = block
        self.behind_every_draft = False
        """Whether each draft that is verified has masks behind it."""
        self._probe: Sequence | None = None
        self._rival, self._rival_every, self._try_rival = 1, PROBE_EVERY, False
        """The best block of the other kind, with masks or without, and how often a step is given to it."""
        self._steps = self._probed = 0
        self._probe_every = PROBE_EVERY
        self._chosen_for: tuple[int | None, tuple[float, ...]] | None = None

    @property
    def chosen(self) -> int:
        """The block of a sequence that fixes nothing."""
        return self._chosen

    def next_step(
        self, running: list[Sequence], acceptance_of: AcceptanceOf, thresholds: tuple[float, ...], kv_tokens: int
    ) -> None:
        """Choose for the next step. New `thresholds` of the engine's own are reason to choose at once."""
        self._steps += 1
        # A batch changes with every sequence that ends; what is best for it changes little below a factor of two.
        situation = ((len(running) - 1).bit_length() if running else None, thresholds)
        if (model := self._step_time.model) is None:
            self._chosen = self._full >> self._steps % self._full.bit_length()
        elif self._steps % CHOOSE_EVERY == 0 or situation != self._chosen_for:
            self._chosen_for = situation
            self._choose(model, running, acceptance_of, kv_tokens)
        self._try_rival = self._rival != self._chosen and self._steps % self._rival_every == PROBE_EVERY // 2
        self._probe = None
        if self._chosen < self._full and running and self._steps % self._probe_every == 0:
            self._probe = running[self._probed % len(running)]
            self._probed += 1

    def block(self, sequence: Sequence, acceptance: Acceptance) -> int:
        """Return the block of a sequence whose request names none."""
        if not _adapts(sequence, acceptance) or sequence is self._probe:
            return self._full
        return self._rival if self._try_rival else self._chosen

    def masks_for(self, sequence: Sequence, acceptance: Acceptance, max_columns: int) -> Masks:
        """Return the masks behind the drafts of a sequence, whose slot has at most `max_columns`."""
        block = sequence.request.decode.block or self.block(sequence, acceptance)
        if block == 1:
            return NO_MASKS
        drafts = len(sequence.draft_tokens)
        rows = drafts + 1 if self.behind_every_draft and acceptance.verify and sequence.accepted_confidences else 1
        left = sequence.max_tokens - sequence.num_output_tokens - (drafts if rows == 1 else 0)
        count = max(0, min(block, left) - 1)
        if rows > 1 and count:
            if rows * count <= ROWS_MOST and len(sequence.tokens) + drafts + rows * count <= max_columns:
                return Masks(count, behind_every_draft=True)
            count = max(0, min(block, left - drafts) - 1)
        if drafts and sequence.draft_tokens[-1] in sequence.stop_ids:
            return NO_MASKS  # the end is in sight
        return Masks(count)

    def _choose(self, model: StepTime, running: list[Sequence], acceptance_of: AcceptanceOf, kv_tokens: int) -> None:
        if self._profile.forwards < CALIBRATED_FORWARDS:
            self._chosen = self._full  # what is accepted is not known either
            return
        adapting = [needs for each in running if (needs := acceptance_of(each)) and _adapts(each, needs)]
        if not adapting:
            return
        best = 0.0
        for behind_every_draft in (False, True):
            tokens_B = np.full(self._full, float(len(running) - len(adapting)))
            fed_B = tokens_B.copy()
            for quality, count in Counter(each.quality for each in adapting).items():
                found = self._profile.lookahead(quality, behind_every_draft=behind_every_draft)
                tokens_B += count * found.tokens_B
                fed_B += count * found.positions_B
            found_B = block_rates(model, tokens_B, fed_B, num_seqs=len(running), kv_tokens=kv_tokens)
            if found_B.max() > best:
                best, rates_B, positions_B = float(found_B.max()), found_B, fed_B
                self.behind_every_draft = behind_every_draft
        self._chosen = 1 + int(rates_B.argmax())
        self._set_trials(model, len(running), rates_B, positions_B, kv_tokens)

    def _set_trials(self, model: StepTime, num_seqs: int, rates_B: Floats, positions_B: Floats, kv_tokens: int) -> None:
        """Choose how often to try other blocks than the one chosen."""
        self._rival = 1 if self._chosen > 1 or self._full == 1 else 2 + int(rates_B[1:].argmax())
        usual_s, rival_s = (
            max(CLOCK_S, model.seconds(StepWork(num_seqs, round(float(positions_B[block - 1])), kv_tokens)))
            for block in (self._chosen, self._rival)
        )
        lost = 1 - float(rates_B[self._rival - 1] / rates_B[self._chosen - 1])
        longer = rival_s / usual_s
        self._rival_every = max(PROBE_EVERY, math.ceil(longer * max(PROBE_EVERY, lost / PROBE_SHARE)))
        probe_s = model.position_s * (self._full - self._chosen)
        self._probe_every = max(PROBE_EVERY, math.ceil(probe_s / (PROBE_SHARE * usual_s)))


def _adapts(sequence: Sequence, acceptance: Acceptance) -> bool:
    """Return whether nothing fixes the block; what the profile knows are thresholds on the probability."""
    request = sequence.request
    if request.decode.block is not None:
        return False
    return acceptance.verify or (request.sampling.seed is None and acceptance.metric is Metric.PROBABILITY)
