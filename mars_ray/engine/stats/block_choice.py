"""Choose the block of each step: the number of masks that are worth the time of their positions.

With a small batch the processor is idle while weights are read, so masks are nearly free. With a large batch each
position costs time. The live profile and the step-time model predict the tokens per second of each block from 1
(autoregressive decoding) to the full block, for which the model was trained. The fastest block is chosen, if it gains
enough over no masks.

Exploration: large and small blocks alternate until step times have been fitted. Afterwards, from time to time, one
sequence gets all masks (a probe), or a whole step runs with a rival block: no masks if the chosen block has masks,
otherwise the best block with masks. Rivals need whole steps because masks also cost time outside the forward. The cost
of probes and of rivals is limited by `PROBE_SHARE`.

The price of a position is the number of tokens that the engine generates in the time that the position takes. The first
positions of a step are cheap, and sequences share them. A token is drafted, and a mask is placed, only if its
expected gain is at least its price.

Requests that fix a block keep it. Requests that accept tokens without verification have answers that depend on the
block. If such a request fixes a seed or a block, its answer must be reproducible, so it gets a fixed price and, unless
it fixes the block, the full block.
"""

import math
from collections import Counter, abc

import numpy as np

from mars_ray.engine.request import Acceptance
from mars_ray.engine.scheduling.scheduler import Masks
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.stats.lookahead import Floats
from mars_ray.engine.stats.profile import Profile
from mars_ray.engine.stats.step_time import CLOCK_S, AheadTime, StepTime, StepTimeFit, block_rates
from mars_ray.method.drafts import (
    FIXED_PRICE,
    LEAST_PRICE,
    PositionPrice,
    masks_behind_drafts,
    masks_behind_the_last,
)
from mars_ray.method.metric import Metric

CHOOSE_EVERY = 16
PROBE_EVERY = 16
"""Minimum number of steps between two probes, and between two rivals."""
PROBE_SHARE = 0.005
"""Maximum share of the time that probes may cost, by estimate. The same limit applies to rivals."""

LEAST_GAIN = 0.05
"""Minimum gain of masks over no masks, as a share of the tokens per second. Predictions are a few percent off, and
without masks a step is never slower than in autoregressive decoding."""

KEEP_USUAL = 1 / 64
"""Weight of a step in the means of what steps gain and cost."""

AcceptanceOf = abc.Callable[[Sequence], Acceptance | None]


class BlockChoice:
    """Chooses a block size, up to the largest block of `profile`, for each step and sequence."""

    def __init__(self, profile: Profile, step_time: StepTimeFit) -> None:
        self._profile = profile
        self._step_time = step_time
        self.chosen = profile.block
        """Block for sequences whose requests do not fix one."""
        self._price = FIXED_PRICE
        """Price of the positions of a sequence."""
        self._worth_of: dict[float, list[float]] = {}
        """Expected gain in tokens from each mask of a row, keyed by threshold."""
        self._unknown = profile.unknown
        """Whether the acceptance of the masks is not known yet."""
        self._probe: Sequence | None = None
        self._rival = 1
        """Block to compare with: 1 if the chosen block has masks, otherwise the best block with masks."""
        self._rival_every = PROBE_EVERY
        self._try_rival = False
        self._steps = self._probed = 0
        self._probe_every = PROBE_EVERY
        self._chosen_for: tuple[int | None, tuple[float, ...]] | None = None
        self._usual_tokens = self._usual_positions = 1.0
        """Recent means of the tokens that a decoding sequence gains in a step, and of its positions."""

    @property
    def _full(self) -> int:
        return self._profile.block

    def observe(self, sequences: int, tokens: int, positions: int) -> None:
        """Record the tokens that the decoding sequences of a step gained, and the positions that they took."""
        self._usual_tokens += KEEP_USUAL * (tokens / sequences - self._usual_tokens)
        self._usual_positions += KEEP_USUAL * (positions / sequences - self._usual_positions)

    def text_price(self, num_seqs: int, kv_tokens: int) -> PositionPrice:
        """Return the price of the positions of a draft from text, from what steps gain and cost at present."""
        model, ahead = self._step_time.model, self._step_time.ahead(num_seqs)
        if model is None or ahead is None:
            return FIXED_PRICE
        more = num_seqs * (self._usual_positions - 1)
        usual_s = ahead.seconds(model, num_seqs, kv_tokens, more, masks=self.chosen > 1)
        return _price(ahead, num_seqs, num_seqs * self._usual_tokens / max(CLOCK_S, usual_s))

    def draft_price(self, sequence: Sequence, acceptance: Acceptance) -> PositionPrice:
        """Return the price of the positions of drafts from masks."""
        return FIXED_PRICE if reproducible(sequence, acceptance) else self._price

    def next_step(
        self, running: list[Sequence], acceptance_of: AcceptanceOf, thresholds: tuple[float, ...], kv_tokens: int
    ) -> None:
        """Prepare the next step. When the engine's `thresholds` change, the block is chosen again at once."""
        self._steps += 1
        self._unknown = self._profile.unknown
        # The best block changes little while the batch changes by less than a factor of two.
        situation = ((len(running) - 1).bit_length() if running else None, thresholds)
        if (model := self._step_time.model) is None:
            self.chosen = self._full >> self._steps % self._full.bit_length()
        elif self._steps % CHOOSE_EVERY == 0 or situation != self._chosen_for:
            self._chosen_for = situation
            self._choose(model, running, acceptance_of, kv_tokens)
        self._try_rival = self._rival != self.chosen and self._steps % self._rival_every == PROBE_EVERY // 2
        self._probe = None
        if self.chosen < self._full and running and self._steps % self._probe_every == 0:
            self._probe = running[self._probed % len(running)]
            self._probed += 1

    def _block(self, sequence: Sequence, acceptance: Acceptance) -> int:
        """Return the block for a sequence whose request does not fix one.

        It may exceed the block of the sequence's own decoder, because it is chosen for the largest block of the engine.
        """
        if not _adapts(sequence, acceptance):
            return self._full
        if self._try_rival:
            return self._rival
        # `masks_for` drops the masks of the full block that are not worth their price.
        return self._full if self._step_time.model is not None and self.chosen > 1 else self.chosen

    def masks_for(
        self, sequence: Sequence, acceptance: Acceptance | None, full: int, max_columns: int, *, trial: bool = False
    ) -> Masks:
        """Return the number of masks after the last token and after each draft, in a slot of `max_columns` tokens.

        `full` is the block that the decoder of the masks was trained for. During a `trial` of a decoder that was off,
        sequences whose block follows the load get all masks.
        """
        drafts = sequence.drafts
        if acceptance is None:
            return masks_behind_the_last(len(drafts.tokens), 0)
        # If the load chose the masks of other sequences, it would change their answers.
        probes = (trial or sequence is self._probe) and _adapts(sequence, acceptance)
        fixed = sequence.request.decode.block
        block = fixed or min(full, self._full if probes else self._block(sequence, acceptance))
        if block == 1:
            return masks_behind_the_last(len(drafts.tokens), 0)
        left = sequence.max_tokens - sequence.num_output_tokens
        most = [max(0, min(block, left - right) - 1) for right in range(len(drafts.tokens) + 1)]
        if drafts.tokens and drafts.tokens[-1] in sequence.stop_ids:
            most[-1] = 0  # the sequence ends with its last draft
        # After drafts from masks, one row of masks shows as much as one after each draft, with fewer positions.
        # After drafts from text it would hardly ever be read.
        explores = self._unknown and not drafts.text and _adapts(sequence, acceptance)
        if not probes and not explores:
            worth_K, price = self._worth_and_price(sequence, acceptance, block)
            rows = masks_behind_drafts(drafts.probabilities, worth_K, price, most)
            if len(sequence.tokens) + len(drafts.tokens) + sum(rows) <= max_columns:
                return rows
        return masks_behind_the_last(len(drafts.tokens), most[-1])

    def _worth_and_price(
        self, sequence: Sequence, acceptance: Acceptance, block: int
    ) -> tuple[list[float], PositionPrice]:
        """Return the expected gain from each mask of a row in tokens, and the price of positions."""
        certain_K = [1.0] * (block - 1)
        if reproducible(sequence, acceptance):
            return certain_K, FIXED_PRICE
        if sequence.request.decode.block is not None or acceptance.metric is not Metric.PROBABILITY:
            return certain_K, self._price
        worth_K = self._worth_of.get(acceptance.threshold, certain_K)
        # The largest block of the engine may have grown since the worth was computed.
        return (worth_K if len(worth_K) >= len(certain_K) else certain_K), self._price

    def _choose(self, model: StepTime, running: list[Sequence], acceptance_of: AcceptanceOf, kv_tokens: int) -> None:
        if self._unknown:
            self.chosen = self._full  # acceptance has not been observed yet
            return
        acceptances = [(sequence, acceptance_of(sequence)) for sequence in running]
        adapting = [acceptance for sequence, acceptance in acceptances if acceptance and _adapts(sequence, acceptance)]
        if not adapting:
            return
        tokens_B = np.full(self._full, float(len(running) - len(adapting)))
        positions_B = tokens_B.copy()
        by_threshold = Counter(acceptance.threshold for acceptance in adapting)
        for threshold, count in by_threshold.items():
            lookahead = self._profile.lookahead(threshold)
            tokens_B += count * lookahead.tokens_B
            positions_B += count * lookahead.positions_B
        num_seqs = len(running)
        ahead = self._step_time.ahead(num_seqs) or AheadTime.linear(model)
        rates_B = block_rates(model, ahead, tokens_B, positions_B, num_seqs=num_seqs, kv_tokens=kv_tokens)
        self.chosen = 1 + int(rates_B.argmax()) if rates_B.max() > (1 + LEAST_GAIN) * rates_B[0] else 1
        self._price = _price(ahead, num_seqs, float(rates_B.max()))
        self._worth_of = {threshold: self._profile.worth_of_masks(threshold, self._price) for threshold in by_threshold}
        self._set_trials(ahead, rates_B, tokens_B)

    def _set_trials(self, ahead: AheadTime, rates_B: Floats, tokens_B: Floats) -> None:
        """Choose the rival, and the numbers of steps between two rivals and between two probes."""
        self._rival = 1 if self.chosen > 1 or self._full == 1 else 2 + int(rates_B[1:].argmax())
        seconds_B = tokens_B / rates_B
        usual_s, rival_s = (float(seconds_B[block - 1]) for block in (self.chosen, self._rival))
        lost = 1 - float(rates_B[self._rival - 1] / rates_B[self.chosen - 1])
        longer = rival_s / usual_s
        self._rival_every = max(PROBE_EVERY, math.ceil(longer * max(PROBE_EVERY, lost / PROBE_SHARE)))
        probe_s = ahead.position_s * (self._full - self.chosen) + ahead.masks_s * (self.chosen == 1)
        self._probe_every = max(PROBE_EVERY, math.ceil(probe_s / (PROBE_SHARE * usual_s)))


def _price(ahead: AheadTime, num_seqs: int, rate: float) -> PositionPrice:
    """Return the price of the positions of each of `num_seqs` sequences that generate `rate` tokens/s together."""
    tokens, cheap_tokens = (max(LEAST_PRICE, seconds * rate) for seconds in (ahead.position_s, ahead.cheap_s))
    return PositionPrice(tokens, ahead.cheap // max(1, num_seqs), cheap_tokens)


def _adapts(sequence: Sequence, acceptance: Acceptance) -> bool:
    """Return whether the block may follow the load. The profile covers only thresholds on the probability."""
    if sequence.request.decode.block is not None or reproducible(sequence, acceptance):
        return False
    return acceptance.metric is Metric.PROBABILITY


def reproducible(sequence: Sequence, acceptance: Acceptance) -> bool:
    """Return whether the answer must not depend on the load, although it keeps tokens that are not the model's own."""
    request = sequence.request
    fixed = request.decode.block is not None or request.sampling.seed is not None
    return fixed and not acceptance.lossless
