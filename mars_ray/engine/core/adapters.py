"""The adapters of an engine: who decodes the masks of a request.

Several stand beside one base, each under the name that requests know it by; the one without a name is that of
requests that name none. Keys and values in the cache are the base's, so sequences share them whatever they name.
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
"""Block of a checkpoint whose card does not say what it was trained for."""

AdaptersByName = abc.Mapping[str | None, Adapter]
"""None names the adapter of requests that name none."""


class Adapters:
    """The adapters `by_name` beside a base with this card."""

    def __init__(self, by_name: AdaptersByName, card: Card | None) -> None:
        self._numbers = {name: number for number, name in enumerate(by_name)}
        self.loras = [adapter.lora for adapter in by_name.values()]
        """Each adapter, by the number that `of` gives."""
        cards: list[Card | AdapterCard | None] = [each.card for each in by_name.values()] or [card]
        self.block = max((each.block for each in cards if each and each.block), default=BLOCK_WITHOUT_CARD)
        """Tokens proposed per forward at most."""
        default = by_name[None].card if None in by_name else cards[0]
        points = default.calibration if default else ()
        self.calibration = {each.threshold: (each.tokens_per_forward, each.agreement) for each in points}
        """Tokens per forward and agreement by threshold, of requests that name no adapter, else of the first."""
        self._base_looks_ahead = not by_name or bool(card and card.block)

    def of(self, sequence: Sequence) -> int:
        """Return which adapter decodes the masks of a sequence; -1 where the base does."""
        return self._numbers.get(sequence.request.decode.adapter, -1)

    def looks_ahead(self, sequence: Sequence) -> bool:
        """Return whether masks of a sequence say anything: a base that has adapters may know no masks itself."""
        return self._base_looks_ahead or self.of(sequence) >= 0

    def correct_masks(
        self,
        samplers: abc.Sequence[MaskCorrector],
        batch: list[ScheduledSequence],
        picks: list[slice],
        output: ForwardOutput,
    ) -> None:
        """Let the masks in `output` know the tokens before them, each by the sampler head of its adapter.

        `picks` begin at the last token of each sequence.
        """
        rows: list[list[MaskRow]] = [[] for _ in samplers]
        for scheduled, where in zip(batch, picks, strict=True):
            if scheduled.num_masks and (number := self.of(scheduled.sequence)) >= 0:
                rows[number] += mask_rows(scheduled, where)
        for sampler, its in zip(samplers, rows, strict=True):
            if its:
                sampler.correct(output, its)

    def check(self, request: Request) -> None:
        """Raise a `RequestError` for an adapter that is not here."""
        name = request.decode.adapter
        if name is not None and name not in self._numbers:
            known = ", ".join(each for each in self._numbers if each) or "none with a name"
            raise RequestError(f"adapter is {name!r}; this engine has {known}.")
