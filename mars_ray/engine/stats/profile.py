"""Estimate the tokens per forward and the agreement of every threshold from the observations of an engine.

Four kinds of observations are used: confidences at masks, outcomes of verification, audits, and the gain from text. An
audit compares tokens accepted at masks with the model's own choice one forward later. Observing needs no extra forward,
and a step only appends its observations to lists.

A block of size b has b - 1 masks. Letters: K masks, B = K + 1 block sizes.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import neg
from typing import Annotated

import numpy as np

from mars_ray.engine.stats.audits import Audits
from mars_ray.engine.stats.grid import GRID
from mars_ray.engine.stats.lookahead import Floats, Lookahead, interpolate, look_ahead
from mars_ray.engine.stats.mask_readings import CALIBRATED_FORWARDS, MaskReadings
from mars_ray.engine.stats.mask_rows import MaskRows
from mars_ray.engine.stats.text_gain import TextGain
from mars_ray.engine.stats.verified_drafts import VerifiedDrafts
from mars_ray.method.drafts import DRAFT_POSITIONS, PositionPrice

FOLD_FORWARDS = 128
"""Number of forwards whose observations are added to the means in one go, once the profile is not unknown."""

Share = Annotated[float, "from 0 to 1"]
"""A share of something, which is at most 1."""


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """Gain, cost and agreement at one threshold of the grid."""

    threshold: Share
    tokens: tuple[float, ...]
    """Tokens gained in an average forward of one sequence with blocks of 1, 2, ... up to the full block."""
    positions: tuple[float, ...]
    """Positions that such a forward uses, by block."""
    agreement: Share | None = None
    """Share of the tokens that autoregressive decoding would also choose after the same prefix; None before the first
    audit at this threshold."""
    audited: float = 0.0
    """Decayed number of audited tokens."""

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per forward with the full block."""
        return self.tokens[-1]

    @property
    def lookahead(self) -> Lookahead:
        """`tokens` and `positions` as arrays."""
        return Lookahead(np.array(self.tokens), np.array(self.positions))


class Profile:
    """Decayed means over the forwards of an engine whose full block is `block`."""

    def __init__(
        self, block: int, calibration: Mapping[float, tuple[float, float]] | None = None, *, lenient: bool = False
    ) -> None:
        """Start from `calibration` as a prior: the tokens per forward and the agreement at each threshold.

        `lenient` says that thresholds apply to drafts (see `Acceptance`).
        """
        masks = block - 1
        self._masks = masks
        self._readings = MaskReadings(masks, lenient=lenient)
        self._verified = VerifiedDrafts(masks)
        self._rows = MaskRows()
        self._text = TextGain()
        self._audits = Audits()
        self._readings.calibrate(calibration or {})

    @property
    def block(self) -> int:
        """Largest block that is observed."""
        return self._masks + 1

    @property
    def lenient(self) -> bool:
        """Whether thresholds apply to drafts."""
        return self._readings.lenient

    def widen(self, block: int, calibration: Mapping[float, tuple[float, float]], *, lenient: bool) -> None:
        """Observe blocks of up to `block` tokens, too. A profile without observations starts from `calibration`."""
        if block > self.block:
            self._fold()
            self._masks = block - 1
            self._readings.widen(self._masks, lenient=lenient)
            self._verified.widen(self._masks)
        if not self.forwards and not self._readings.new:
            self._readings.calibrate(calibration)

    def forget(self, calibration: Mapping[float, tuple[float, float]]) -> None:
        """Forget all observations and start again from `calibration`."""
        Profile.__init__(self, self.block, calibration, lenient=self.lenient)

    @property
    def forwards(self) -> float:
        """Decayed number of observed forwards."""
        return self._readings.forwards

    @property
    def unknown(self) -> bool:
        """Whether too few forwards have been observed, without a calibration."""
        return self.forwards < CALIBRATED_FORWARDS

    def observe_masks(self, looked: int, confidences: list[float], price: PositionPrice, *, ends: bool = False) -> None:
        """Record a forward of one sequence that read `looked` masks, with the confidences at the first of them.

        Tokens are drafted while they are worth their `price` (see `sampling/verify`). `ends` means that a stop token
        ends the sequence. In that case `confidences` ends with the stop token, and is empty if the stop token is the
        autoregressive token.
        """
        self._readings.observe(looked, confidences, price, ends)
        new = self._readings.new
        if new >= FOLD_FORWARDS or (new >= CALIBRATED_FORWARDS and self.unknown):
            self._fold()

    def observe_drafts(
        self, confidences: list[float], ratios: list[float], *, after: int = 0, ends: bool = False
    ) -> None:
        """Record verified drafts that follow `after` accepted tokens at masks.

        `ratios` are those of the drafts up to the first that was not kept: 1 for a right one (see `Verification`).
        `ends` means that the last draft is a stop token.
        """
        self._verified.observe(after, confidences, ratios, ends)

    def observe_rows(self, masks: tuple[int, ...], *, read: bool, surprised: bool) -> None:
        """Record the lengths of a forward's mask rows, whether a row was read, and whether a draft was wrong."""
        self._rows.observe(masks, read=read, surprised=surprised)

    def observe_text(self, drafts: int, right: int, replaced: Sequence[float]) -> None:
        """Record a forward with `drafts` drafts from text, perhaps 0, of which the first `right` were right.

        `replaced` are the probabilities of the drafts from masks that the text replaced.
        """
        self._text.observe(drafts, right, replaced)

    def observe_audit(self, threshold: float, confidences: list[float], right: list[bool]) -> None:
        """Record which tokens kept because of the threshold are `right`, i.e. equal the model's own choice.

        Tokens after a wrong draft are not judged. `confidences` were measured at acceptance; for drafts kept by
        lenience they are the ratios. The audit counts for `threshold` and all higher thresholds.
        """
        self._audits.observe(threshold, confidences, right)

    def lookahead(self, threshold: float) -> Lookahead:
        """Return the gain and the cost of each block at a threshold, interpolated linearly over the grid."""
        return interpolate(GRID, self._at, threshold)

    def worth_of_masks(self, threshold: float, price: PositionPrice) -> list[float]:
        """Return the expected gain in tokens from each mask, less the cost of the positions that verify drafts."""
        number = max(0, bisect_right(GRID, -threshold, key=neg) - 1)
        accepted_K, drafted_K, right_K = self._shares(number)
        price_K = [price.of_position(DRAFT_POSITIONS * mask) for mask in range(self._masks)]
        worth_K: list[float] = (accepted_K + right_K - price_K * drafted_K).tolist()
        return worth_K

    def points(self) -> tuple[ProfilePoint, ...]:
        """Fold all observations and return the profile over the grid."""
        self._fold()
        curve = []
        for number, threshold in enumerate(GRID):
            lookahead = self._at(number)
            tokens = float(lookahead.tokens_B[-1])
            # Without lenience tokens from text are the model's own choice, as is the first token of a forward.
            ahead = (tokens if self.lenient else float(self._masks_at(number).tokens_B[-1])) - 1
            audited = float(self._audits.audited_G[number])
            agreement = None
            if threshold >= 1:
                agreement = 1.0
            elif audited > 0:
                agreement = 1 - (1 - float(self._audits.agreed_G[number]) / audited) * ahead / tokens
            by_block = tuple(lookahead.tokens_B.tolist()), tuple(lookahead.positions_B.tolist())
            curve.append(ProfilePoint(threshold, *by_block, agreement, audited))
        return tuple(curve)

    def _at(self, number: int) -> Lookahead:
        ahead = self._masks_at(number)
        text_2B = self._text.by_block(self.block)
        return Lookahead(ahead.tokens_B + text_2B[0], ahead.positions_B + text_2B[1])

    def _masks_at(self, number: int) -> Lookahead:
        return look_ahead(*self._shares(number), rows_per_draft=self._rows.per_draft)

    def _shares(self, number: int) -> tuple[Floats, Floats, Floats]:
        """Return the shares of forwards that accept, draft, and draft correctly at each mask (see `look_ahead`)."""
        readings = self._readings
        whole = self._verified.truth_of_whole(number)
        surprises = max(0.0, readings.drafting_G[number] - whole * readings.all_right_G[number])
        unread = surprises * self._rows.unread
        forwards_K = np.maximum(readings.looked_K + whole * readings.ended_GK[number] + unread, 1e-9)
        drafted_K = readings.drafted_GK[number] / forwards_K
        right_K = np.minimum(readings.likely_GK[number] / forwards_K * self._verified.truth(number), drafted_K)
        return readings.accepted_GK[number] / forwards_K, drafted_K, right_K

    def _fold(self) -> None:
        self._readings.fold()
        self._verified.fold()
        self._audits.fold()
