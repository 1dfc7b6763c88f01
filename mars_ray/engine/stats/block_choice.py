"""Choose the block of each step: how many masks pay for their positions.

A small batch leaves the processor idle while weights are read, so masks are nearly free; in a large batch each position
costs time. The live profile and the step-time model give the expected tokens per second of each block between 1
(autoregressive decoding) and the block that the model was trained for; the best one is chosen.

Exploration: large and small blocks alternate until step times have been fitted. Afterwards one sequence is given all
masks now and then (a probe), and a whole step runs with the best block of the other kind, with masks or without (a
rival). A whole step is needed because the cost of a mask includes work outside the forward. Both are bounded by
`PROBE_SHARE`.

Where drafts are verified, each sequence decides by the price of a position, which is the number of tokens that the
engine generates in the time of a position. A token is drafted, and a mask is placed, if its expected gain pays that.

Requests that fix a block keep it. So do requests that fix a seed and trust tokens at masks, because the block changes
their output.
"""

import math
from collections import Counter, abc
from itertools import accumulate, pairwise
from operator import mul

import numpy as np

from mars_ray.engine.request import Acceptance
from mars_ray.engine.scheduling.scheduler import Masks
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.stats.lookahead import Floats
from mars_ray.engine.stats.profile import CALIBRATED_FORWARDS, Profile
from mars_ray.engine.stats.step_time import CLOCK_S, StepTime, StepTimeFit, StepWork, block_rates
from mars_ray.method.metric import Metric

CHOOSE_EVERY = 16
PROBE_EVERY = 16
"""Least number of steps between two probes, and between two rivals."""
PROBE_SHARE = 0.005
"""Largest share of the time that exploration may cost, as estimated."""

COLUMNS_MOST = 63
"""Limit of the drafts and masks of one sequence with several rows of masks; `ForwardBatch.behind_N` has 63 bits."""

DRAFT_POSITIONS = 2
"""Positions of one more draft: its own, and about one for masks behind it."""
FIRST_PRICE, LEAST_PRICE = 0.05, 0.01
"""Price of a position in tokens: before step times have been fitted, and its lower bound."""

AcceptanceOf = abc.Callable[[Sequence], Acceptance | None]


class BlockChoice:
    """Chooses blocks from 1 to `block`."""

    def __init__(self, profile: Profile, step_time: StepTimeFit, block: int) -> None:
        self._profile, self._step_time, self._full = profile, step_time, block
        self._chosen = block
        self._price = FIRST_PRICE
        """Tokens that the engine generates in the time of one position."""
        self._worth_K = [1.0] * (block - 1)
        """Expected gain in tokens of the k-th mask of a row where drafts are verified."""
        self._probe: Sequence | None = None
        self._rival = 1
        """The best block of the other kind: 1 if the chosen one has masks, else the best one with masks."""
        self._rival_every = PROBE_EVERY
        self._try_rival = False
        self._steps = self._probed = 0
        self._probe_every = PROBE_EVERY
        self._chosen_for: tuple[int | None, tuple[float, ...]] | None = None

    @property
    def chosen(self) -> int:
        """The block of sequences that fix none."""
        return self._chosen

    @property
    def draft_price(self) -> float:
        """Probability that a draft and all before it are right, below which it does not pay."""
        return DRAFT_POSITIONS * self._price

    def next_step(
        self, running: list[Sequence], acceptance_of: AcceptanceOf, thresholds: tuple[float, ...], kv_tokens: int
    ) -> None:
        """Prepare the next step. The block is chosen again at once when the engine's `thresholds` change."""
        self._steps += 1
        # The best block changes little while the batch changes by less than a factor of two.
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
        """Return the block of a sequence whose request fixes none."""
        if not _adapts(sequence, acceptance) or sequence is self._probe:
            return self._full
        if self._try_rival:
            return self._rival
        # With verification `masks_for` then cuts the full block down by price.
        by_price = acceptance.verify and self._step_time.model is not None and self._chosen > 1
        return self._full if by_price else self._chosen

    def masks_for(self, sequence: Sequence, acceptance: Acceptance | None, max_columns: int) -> Masks:
        """Return the number of masks behind the last token and behind each draft, in a slot of `max_columns`."""
        drafts, fixed = sequence.draft_tokens, sequence.request.decode.block
        if acceptance is None or (block := fixed or self.block(sequence, acceptance)) == 1:
            return (0,) * (1 + len(drafts))
        left = sequence.max_tokens - sequence.num_output_tokens
        most = [max(0, min(block, left - right) - 1) for right in range(len(drafts) + 1)]
        if drafts and drafts[-1] in sequence.stop_ids:
            most[-1] = 0  # the sequence ends with its last draft
        sure = sequence.accepted_confidences
        if acceptance.verify and len(sure) == len(drafts) and sequence is not self._probe:
            worth_K = [1.0] * (fixed - 1) if fixed else self._worth_K
            rows = masks_behind_drafts(sure, worth_K, self._price, most)
            added = len(drafts) + sum(rows)
            if not any(rows[:-1]) or (added <= COLUMNS_MOST and len(sequence.tokens) + added <= max_columns):
                return rows
        return (*(0 for _ in drafts), most[-1])

    def _choose(self, model: StepTime, running: list[Sequence], acceptance_of: AcceptanceOf, kv_tokens: int) -> None:
        if self._profile.forwards < CALIBRATED_FORWARDS:
            self._chosen = self._full  # acceptance has not been observed either
            return
        acceptances = [(sequence, acceptance_of(sequence)) for sequence in running]
        adapting = [needs for sequence, needs in acceptances if needs and _adapts(sequence, needs)]
        if not adapting:
            return
        tokens_B = np.full(self._full, float(len(running) - len(adapting)))
        positions_B = tokens_B.copy()
        for quality, count in Counter(needs.quality for needs in adapting).items():
            lookahead = self._profile.lookahead(quality)
            tokens_B += count * lookahead.tokens_B
            positions_B += count * lookahead.positions_B
        rates_B = block_rates(model, tokens_B, positions_B, num_seqs=len(running), kv_tokens=kv_tokens)
        self._chosen = 1 + int(rates_B.argmax())
        self._price = max(LEAST_PRICE, model.position_s * float(rates_B.max()))
        self._worth_K = self._profile.worth_of_masks(self._price)
        self._set_trials(model, len(running), rates_B, positions_B, kv_tokens)

    def _set_trials(self, model: StepTime, num_seqs: int, rates_B: Floats, positions_B: Floats, kv_tokens: int) -> None:
        """Choose the rival, and how often it and a probe are tried."""
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


def masks_behind_drafts(
    confidences: abc.Sequence[float], worth_K: abc.Sequence[float], price: float, most: abc.Sequence[int]
) -> Masks:
    """Return the number of masks behind the last token and behind each draft.

    Each draft may be the last right one, and then the masks behind it are read (quadratic decoding, arXiv 2507.11851).
    `confidences` are the probabilities that a draft is right if those before it are. The k-th mask of the row that is
    read gains `worth_K[k]` tokens, a position costs `price` tokens, and a row has at most `most` masks.
    """
    right = [*accumulate(confidences, mul, initial=1.0), 0.0]  # probability that at least n drafts are right
    rows = []
    for (at_least, more), limit in zip(pairwise(right), most, strict=True):
        read = at_least - more
        count = next((k for k, worth in enumerate(worth_K[:limit]) if read * worth < price), min(limit, len(worth_K)))
        rows.append(count)
    return tuple(rows)


def _adapts(sequence: Sequence, acceptance: Acceptance) -> bool:
    """Return whether the block may be chosen. The profile knows thresholds on the probability only."""
    request = sequence.request
    if request.decode.block is not None:
        return False
    return acceptance.verify or (request.sampling.seed is None and acceptance.metric is Metric.PROBABILITY)
