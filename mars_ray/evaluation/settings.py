"""The ways of decoding that an evaluation compares; autoregressive decoding is first, all else is compared with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from mars_ray.adapter.card import AdapterCard
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.errors import ConfigError, ModelError, RequestError
from mars_ray.model.card import CARD_FILE, Card


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSetting:
    """One way of decoding that is compared."""

    mode: Mode
    threshold: float
    """Threshold of confidence; it has no meaning in modes ar and exact."""

    @property
    def name(self) -> str:
        """The name as it stands in ids, tables and charts."""
        return f"threshold {self.threshold:.15g}" if self.mode is Mode.THRESHOLD else self.mode.value

    @property
    def decode(self) -> DecodeParams:
        """What a request asks for that leaves it to the engine how far to look ahead."""
        return DecodeParams(mode=self.mode, threshold=self.threshold)


AR = DecodingSetting(mode=Mode.AR, threshold=1.0)
EXACT = DecodingSetting(mode=Mode.EXACT, threshold=1.0)


def settings_of(modes: Sequence[str], thresholds: Sequence[float]) -> tuple[DecodingSetting, ...]:
    """Return the settings: ar, exact, then threshold from the highest on. Raises `ConfigError` for values unknown."""
    for name in modes:
        if name not in list(Mode):
            close = get_close_matches(name, [mode.value for mode in Mode], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"unknown mode {name!r}; choose from {', '.join(Mode)}.{hint}")
    found = [AR]
    if Mode.EXACT in modes:
        found.append(EXACT)
    if Mode.THRESHOLD in modes:
        if not thresholds:
            raise ConfigError("mode threshold needs at least one threshold, such as --thresholds 1.0,.95.")
        found += [_at(threshold) for threshold in sorted(set(thresholds), reverse=True)]
    return tuple(found)


def block_of(card: Card | AdapterCard | None, model: str, settings: Sequence[DecodingSetting]) -> int:
    """Return how many tokens a forward proposes: as many as the model was trained to.

    Raises `ModelError` for a model that was not, unless nothing looks ahead.
    """
    if card is not None and card.block is not None:
        return card.block
    if any(setting.mode is not Mode.AR for setting in settings):
        why = f"it has no {CARD_FILE}" if card is None else f"its {CARD_FILE} names no block"
        raise ModelError(
            f"{model} was not trained to look ahead ({why}): it can be evaluated with --modes ar alone. "
            'Train it with method "mars" to compare thresholds.'
        )
    return 1


def _at(threshold: float) -> DecodingSetting:
    try:
        DecodeParams(threshold=threshold)
    except RequestError as error:
        raise ConfigError(str(error)) from None
    return DecodingSetting(mode=Mode.THRESHOLD, threshold=threshold)
