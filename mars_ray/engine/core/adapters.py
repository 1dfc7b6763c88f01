"""The adapters of an engine, which decode masks.

Requests choose an adapter by its name; the adapter without a name is the default. The cache holds keys and values of
the base model, so sequences with different adapters can share them. Adapters may change between two steps. A request
keeps the adapter that it began with, and an adapter is freed once it has neither a name nor requests.
"""

from collections import abc
from dataclasses import dataclass
from pathlib import Path

from mars_ray.adapter.card import AdapterCard
from mars_ray.adapter.folder import Adapter, AdapterLoader
from mars_ray.engine.execution.model_runner import ForwardOutput, MaskRow, ModelRunner, PackedAdapter, Picks
from mars_ray.engine.request import Request, check_adapter
from mars_ray.engine.scheduling.scheduler import ScheduledSequence
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.stats.acceptance_watch import AcceptanceWatch
from mars_ray.engine.stats.state import SourceAcceptance
from mars_ray.errors import AdapterError
from mars_ray.model.card import Card, gains
from mars_ray.model.checkpoint import Checkpoint

AdaptersByName = abc.Mapping[str | None, Adapter]
"""Adapters by the names that requests use; None is the key of the default adapter."""

Calibration = dict[float, tuple[float, float]]
"""Tokens per forward and agreement at each threshold."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter in the form that the engine's runner computes with, and its card."""

    packed: PackedAdapter
    card: AdapterCard

    @property
    def nbytes(self) -> int:
        """Memory of the adapter in bytes."""
        return self.packed.nbytes


@dataclass(frozen=True, slots=True)
class MaskDecoder:
    """The decoder of a request's masks: an adapter, or the base model if `adapter` is None."""

    adapter: LoadedAdapter | None
    block: int
    """Largest number of tokens proposed per forward. At 1 there are no masks."""
    watch: AcceptanceWatch

    @property
    def lenient(self) -> bool:
        """Whether thresholds apply to drafts, which the base judges, because the adapter knows less than the base."""
        return self.adapter is not None


class Adapters:
    """The adapters of the model `base`, for the steps of `runner`."""

    def __init__(self, runner: ModelRunner, base: Checkpoint, by_name: AdaptersByName) -> None:
        """Pack the adapters `by_name`. Raises `AdapterError` if one does not fit the model."""
        self._runner = runner
        self._loader = AdapterLoader(base.folder) if base.folder else None
        packed = {name: self.pack(adapter) for name, adapter in by_name.items()}
        unnamed = packed.get(None)
        self._default_card = unnamed.card if unnamed else base.card
        self.default = _decoder("masks", unnamed, self._default_card)
        """Decoder of requests that name no adapter. A model without a card was not trained on masks, so it has none."""
        self._named: dict[str, MaskDecoder] = {}
        self._of_request: dict[str, MaskDecoder] = {}
        """Decoder of each request that has not ended."""
        self._numbers: dict[LoadedAdapter, int] = {}
        """Index of each adapter in the runner's list."""
        self.set({name: adapter for name, adapter in packed.items() if name is not None})

    def load(self, folder: Path) -> LoadedAdapter:
        """Load and pack an adapter, as `Engine.load_adapter` does."""
        if self._loader is None:
            raise AdapterError(f"{folder} cannot be checked, because this model was not loaded from a folder.")
        return self.pack(self._loader.load(folder))

    def pack(self, adapter: Adapter) -> LoadedAdapter:
        """Pack an adapter. Raises `AdapterError` if it does not fit the model."""
        return LoadedAdapter(self._runner.pack(adapter.lora), adapter.card)

    @property
    def block(self) -> int:
        """Largest block of all decoders."""
        return max(decoder.block for decoder in self._decoders)

    @property
    def lenient(self) -> bool:
        """Whether thresholds apply to drafts, for the first decoder that has masks."""
        return next((decoder.lenient for decoder in self._decoders if decoder.block > 1), False)

    @property
    def have_masks(self) -> bool:
        """Whether any decoder has masks that are not switched off."""
        return any(decoder.block > 1 and not decoder.watch.off for decoder in self._decoders)

    @property
    def acceptance(self) -> tuple[SourceAcceptance, ...]:
        """Acceptance of the latest predictions, for each decoder that has predicted tokens."""
        return tuple(filter(None, (decoder.watch.state() for decoder in self._decoders)))

    @property
    def calibration(self) -> Calibration:
        """Calibration from the card of the default decoder, or else from the first adapter."""
        cards = [self._default_card, *(decoder.adapter.card for decoder in self._named.values() if decoder.adapter)]
        return gains(next((card.calibration for card in cards if card and card.calibration), ()))

    def set(self, named: abc.Mapping[str, LoadedAdapter]) -> None:
        """Replace all adapters that have a name by these. An adapter that keeps its name keeps its acceptance."""
        known = self._named
        self._named = {
            name: known[name] if name in known and known[name].adapter is adapter else _named_decoder(name, adapter)
            for name, adapter in named.items()
        }
        self._free_unused()

    def begin(self, request: Request) -> None:
        """Choose the decoder of a request that `check` has accepted, until `end`."""
        name = request.decode.adapter
        self._of_request[request.id] = self.default if name is None else self._named[name]

    def end(self, request_id: str) -> None:
        """Free the adapter of a request that has ended if nothing else needs it."""
        del self._of_request[request_id]
        self._free_unused()

    def number(self, sequence: Sequence) -> int:
        """Return the index of the adapter that decodes the masks of a sequence, or -1 for the base model."""
        adapter = self._of_request[sequence.request.id].adapter
        return -1 if adapter is None else self._numbers[adapter]

    def decoder_of(self, sequence: Sequence) -> MaskDecoder:
        """Return the decoder of the masks of a sequence."""
        return self._of_request[sequence.request.id]

    def correct_masks(self, batch: list[ScheduledSequence], picks: list[Picks], output: ForwardOutput) -> None:
        """Correct the logits of masks in `output` with the sampler heads of their adapters."""
        rows_by_adapter: dict[LoadedAdapter, list[MaskRow]] = {}
        for scheduled, sequence_picks in zip(batch, picks, strict=True):
            adapter = self._of_request[scheduled.sequence.request.id].adapter
            if scheduled.num_masks and adapter is not None:
                rows_by_adapter.setdefault(adapter, []).extend(sequence_picks.rows)
        for adapter, rows in rows_by_adapter.items():
            adapter.packed.sampler.correct(output, rows)

    def check(self, request: Request) -> None:
        """Raise a `RequestError` if the adapter of a request is unknown."""
        check_adapter(request.decode.adapter, self._named)

    @property
    def _decoders(self) -> tuple[MaskDecoder, ...]:
        return self.default, *self._named.values()

    def _free_unused(self) -> None:
        """Keep only adapters with a name or with requests in the runner."""
        wanted = [decoder.adapter for decoder in (*self._decoders, *self._of_request.values())]
        numbers = {adapter: number for number, adapter in enumerate(dict.fromkeys(filter(None, wanted)))}
        if list(numbers) != list(self._numbers):
            self._numbers = numbers
            self._runner.use([adapter.packed for adapter in numbers])


def _named_decoder(name: str, adapter: LoadedAdapter) -> MaskDecoder:
    return _decoder(f"masks of {name}", adapter, adapter.card)


def _decoder(source: str, adapter: LoadedAdapter | None, card: Card | AdapterCard | None) -> MaskDecoder:
    """Return a decoder of masks that `card` describes. Without a card it has no masks."""
    lossless = max(card.calibration, key=lambda point: point.threshold, default=None) if card else None
    watch = AcceptanceWatch(source, lossless.tokens_per_forward if lossless else None)
    return MaskDecoder(adapter, (card and card.block) or 1, watch)
