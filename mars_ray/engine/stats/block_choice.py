"""How many masks are worth their positions in the next step.

A small batch leaves the processor idle while weights are read, so masks are nearly free; a large one pays for each
position. The block with the most expected tokens per second, by the live profile and the step-time model, lies between
1, which is autoregressive decoding, and the block the model was trained for. Before step times are known, large and
small blocks take turns, to tell what a mask costs from what a step does. Where few masks are fed, one sequence now and
then gets all, so that profile and step time go on learning, at a small part of the time. What a mask costs is told by
whole steps only, for it falls with their number and includes all that the engine does with them besides the forward:
one step now and then is of the other kind, without masks or with masks for all, the more often the nearer it comes.

Where drafts are verified and masks are worth their while, each sequence decides by the price of a position: the tokens
that the engine makes in the time it takes. A token is drafted while its chance to be right pays for that, and a mask
stands where its chance to be read does (`mask_rows`).

A request that fixes its block is left alone, and so is one that fixes its seed while tokens ahead are trusted: what
comes out depends on the block then.
"""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from mars_ray.engine.request import Acceptance
from mars_ray.engine.scheduling.scheduler import Masks
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.stats.lookahead import Floats
from mars_ray.engine.stats.mask_rows import mask_rows
from mars_ray.engine.stats.profile import CALIBRATED_FORWARDS, Profile
from mars_ray.engine.stats.step_time import CLOCK_S, StepTime, StepTimeFit, StepWork, block_rates
from mars_ray.method.metric import Metric

CHOOSE_EVERY = 16
PROBE_EVERY = 16
"""Steps, and times the length of a step, between two that try something else, at least."""
PROBE_SHARE = 0.005
"""Part of the time that trying something else may cost at most, by what is known."""

COLUMNS_MOST = 63
"""Drafts and masks of one sequence in a step, where there are several rows of masks: what a mask attends to is told by
as many bits."""

DRAFT_POSITIONS = 2
"""Positions that one more draft takes: its own, and about one more for masks behind it."""
FIRST_PRICE, LEAST_PRICE = 0.05, 0.01
"""What a position costs before step times are known, in tokens, and what it costs at least."""

AcceptanceOf = Callable[[Sequence], Acceptance | None]


class BlockChoice:
    """Chooses between 1 and `block`."""

    def __init__(self, profile: Profile, step_time: StepTimeFit, block: int) -> None:
        self._profile, self._step_time, self._full = profile, step_time, block
        self._chosen = block
        self._price = FIRST_PRICE
        """Tokens that the engine makes in the time of one position."""
        self._worth_K = [1.0] * (block - 1)
        """Tokens that the k-th mask of a row is worth whose drafts are verified."""
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

    @property
    def draft_price(self) -> float:
        """Tokens a draft has to give for what it costs."""
        return DRAFT_POSITIONS * self._price

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
        if self._try_rival:
            return self._rival
        # Whether masks are fed at all is a matter of all sequences; how many is one of each whose drafts are verified.
        by_price = acceptance.verify and self._step_time.model is not None and self._chosen > 1
        return self._full if by_price else self._chosen

    def masks_for(self, sequence: Sequence, acceptance: Acceptance | None, max_columns: int) -> Masks:
        """Return the masks behind the last token and each draft of a sequence, whose slot has at most `max_columns`."""
        drafts, fixed = sequence.draft_tokens, sequence.request.decode.block
        if acceptance is None or (block := fixed or self.block(sequence, acceptance)) == 1:
            return (0,) * (1 + len(drafts))
        left = sequence.max_tokens - sequence.num_output_tokens
        most = [max(0, min(block, left - right) - 1) for right in range(len(drafts) + 1)]
        if drafts and drafts[-1] in sequence.stop_ids:
            most[-1] = 0  # the end is in sight
        sure = sequence.accepted_confidences
        if acceptance.verify and len(sure) == len(drafts) and sequence is not self._probe:
            worth_K = [1.0] * (fixed - 1) if fixed else self._worth_K
            rows = mask_rows(sure, worth_K, self._price, most)
            added = len(drafts) + sum(rows)
            if not any(rows[:-1]) or (added <= COLUMNS_MOST and len(sequence.tokens) + added <= max_columns):
                return rows
        return (*(0 for _ in drafts), most[-1])

    def _choose(self, model: StepTime, running: list[Sequence], acceptance_of: AcceptanceOf, kv_tokens: int) -> None:
        if self._profile.forwards < CALIBRATED_FORWARDS:
            self._chosen = self._full  # what is accepted is not known either
            return
        adapting = [needs for each in running if (needs := acceptance_of(each)) and _adapts(each, needs)]
        if not adapting:
            return
        tokens_B = np.full(self._full, float(len(running) - len(adapting)))
        positions_B = tokens_B.copy()
        for quality, count in Counter(each.quality for each in adapting).items():
            found = self._profile.lookahead(quality)
            tokens_B += count * found.tokens_B
            positions_B += count * found.positions_B
        rates_B = block_rates(model, tokens_B, positions_B, num_seqs=len(running), kv_tokens=kv_tokens)
        self._chosen = 1 + int(rates_B.argmax())
        self._price = max(LEAST_PRICE, model.position_s * float(rates_B.max()))
        self._worth_K = self._profile.worth_of_masks(self._price)
        self._set_trials(model, len(running), rates_B, positions_B, kv_tokens)

    def _set_trials(self, model: StepTime, num_seqs: int, rates_B: Floats, positions_B: Floats, kv_tokens: int) -> None:
        """Choose how often to try other blocks than the one chosen."""
        self._rival = 1 if self._chosen > 1 or self._full == 1 else 2 + int(rates_B[1:].argmax())
        usual_s, rival_s = (
            max(
                CLOCK_S,
                model.seconds(StepWork(num_seqs, round(float(positions_B[block - 1])), kv_tokens, masks=block - 1)),
            )
            for block in (self._chosen, self._rival)
        )
        lost = 1 - float(rates_B[self._rival - 1] / rates_B[self._chosen - 1])
        longer = rival_s / usual_s
        self._rival_every = max(PROBE_EVERY, math.ceil(longer * max(PROBE_EVERY, lost / PROBE_SHARE)))
        probe_s = model.position_s * (self._full - self._chosen) + model.masks_s * (self._chosen == 1)
        self._probe_every = max(PROBE_EVERY, math.ceil(probe_s / (PROBE_SHARE * usual_s)))


def _adapts(sequence: Sequence, acceptance: Acceptance) -> bool:
    """Return whether nothing fixes the block; what the profile knows are thresholds on the probability."""
    request = sequence.request
    if request.decode.block is not None:
        return False
    return acceptance.verify or (request.sampling.seed is None and acceptance.metric is Metric.PROBABILITY)
