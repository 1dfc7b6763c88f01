"""The adapters of an engine, which decode masks.

Requests choose an adapter by its name; the adapter without a name is the default. The cache holds keys and values of
the base model, so sequences with different adapters can share them.
"""

from collections import abc

from mars_ray.adapter.card import AdapterCard
from mars_ray.adapter.folder import Adapter
from mars_ray.engine.execution.mask_sampler import mask_rows
from mars_ray.engine.execution.model_runner import ForwardOutput, MaskCorrector, MaskRow
from mars_ray.engine.request import Request
from mars_ray.engine.scheduling.scheduler import ScheduledSequence
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.errors import RequestError
from mars_ray.model.card import Card

BLOCK_WITHOUT_CARD = 8
"""Default block, for a checkpoint whose card does not set one."""

AdaptersByName = abc.Mapping[str | None, Adapter]
"""Adapters by the names that requests use; None is the key of the default adapter."""


class Adapters:
    """The adapters of one base model, whose card is `card`."""

    def __init__(self, by_name: AdaptersByName, card: Card | None) -> None:
        self._numbers = {name: number for number, name in enumerate(by_name)}
        self.loras = [adapter.lora for adapter in by_name.values()]
        """Weights of each adapter, indexed by the number that `of` returns."""
        cards: list[Card | AdapterCard | None] = [adapter.card for adapter in by_name.values()] or [card]
        self.block = max((entry.block for entry in cards if entry and entry.block), default=BLOCK_WITHOUT_CARD)
        """Largest number of tokens proposed per forward."""
        default = by_name[None].card if None in by_name else cards[0]
        points = default.calibration if default else ()
        self.calibration = {point.threshold: (point.tokens_per_forward, point.agreement) for point in points}
        """Tokens per forward and agreement at each threshold, from the default adapter's card or else from the first
        card."""
        self._base_looks_ahead = not by_name or bool(card and card.block)

    def of(self, sequence: Sequence) -> int:
        """Return the number of the adapter that decodes the masks of a sequence, or -1 for the base model."""
        return self._numbers.get(sequence.request.decode.adapter, -1)

    def looks_ahead(self, sequence: Sequence) -> bool:
        """Return whether masks help a sequence. A base model with adapters may not have been trained on masks."""
        return self._base_looks_ahead or self.of(sequence) >= 0

    def correct_masks(
        self,
        samplers: abc.Sequence[MaskCorrector],
        batch: list[ScheduledSequence],
        picks: list[slice],
        output: ForwardOutput,
    ) -> None:
        """Correct the logits of masks in `output` with the sampler heads of their adapters.

        `picks` holds the picks of each sequence, beginning at its last token.
        """
        rows_by_adapter: list[list[MaskRow]] = [[] for _ in samplers]
        for scheduled, sequence_picks in zip(batch, picks, strict=True):
            if scheduled.num_masks and (number := self.of(scheduled.sequence)) >= 0:
                rows_by_adapter[number] += mask_rows(scheduled, sequence_picks)
        for sampler, rows in zip(samplers, rows_by_adapter, strict=True):
            if rows:
                sampler.correct(output, rows)

    def check(self, request: Request) -> None:
        """Raise a `RequestError` if the adapter of a request is unknown."""
        name = request.decode.adapter
        if name is not None and name not in self._numbers:
            names = ", ".join(filter(None, self._numbers)) or "no adapters with a name"
            raise RequestError(f"adapter is {name!r}; this engine has {names}.")
