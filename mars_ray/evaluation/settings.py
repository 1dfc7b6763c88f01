"""Decoding settings that an evaluation compares, with autoregressive decoding always first."""

from collections.abc import Sequence
from dataclasses import dataclass

from mars_ray.adapter.card import AdapterCard
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from mars_ray.errors import ConfigError, ModelError, RequestError, did_you_mean
from mars_ray.model.card import CARD_FILE, Card


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSetting:
    """A mode and a threshold to evaluate."""

    mode: Mode
    threshold: float
    """What a token ahead must reach to be kept; it has no effect in modes ar and exact."""

    @property
    def name(self) -> str:
        """Name of the setting in ids, tables and charts."""
        return f"{self.mode.value} {self.threshold:.15g}" if self.mode is Mode.THRESHOLD else self.mode.value

    @property
    def decode(self) -> DecodeParams:
        """Decoding parameters that leave the number of masks to the engine."""
        return DecodeParams(mode=self.mode, threshold=self.threshold)


MODEL_THRESHOLDS = (0.99, 0.95, 0.9, 0.8, 0.6)
"""Default thresholds for a model that was trained on masks: confidences at masks."""
ADAPTER_THRESHOLDS = (0.5, 0.3, 0.1, 0.05, 0.02)
"""Default thresholds for an adapter: ratios of drafts (see `Acceptance`), which gain most where they are small."""
AR = DecodingSetting(mode=Mode.AR, threshold=1.0)
EXACT = DecodingSetting(mode=Mode.EXACT, threshold=1.0)


def settings_of(modes: Sequence[str], thresholds: Sequence[float]) -> tuple[DecodingSetting, ...]:
    """Return the settings: ar, exact, then thresholds in descending order. Raises `ConfigError` for unknown values."""
    for name in modes:
        if name not in list(Mode):
            raise ConfigError(f"unknown mode {name!r}; choose from {', '.join(Mode)}.{did_you_mean(name, Mode)}")
    settings = [AR]
    if Mode.EXACT in modes:
        settings.append(EXACT)
    if Mode.THRESHOLD in modes:
        if not thresholds:
            raise ConfigError("mode threshold needs at least one threshold, such as --thresholds 1.0,.95.")
        settings += [_at(threshold) for threshold in sorted(set(thresholds), reverse=True)]
    return tuple(settings)


def block_of(
    card: Card | AdapterCard | None, model: str, settings: Sequence[DecodingSetting], block: int | None = None
) -> int:
    """Return the number of tokens proposed per forward: `block`, or as set by the model's training.

    Raises `ModelError` for a model without MARS training if a setting has a threshold, and `ConfigError` for a `block`
    larger than that of training, or for such a model.
    """
    if card is not None and card.block is not None:
        if block is not None and block > card.block:
            raise ConfigError(f"block is {block}; {model} was trained with {card.block}, which is the largest.")
        return block or card.block
    if any(setting.mode is Mode.THRESHOLD for setting in settings):
        reason = f"it has no {CARD_FILE}" if card is None else f"its {CARD_FILE} names no block"
        raise ModelError(
            f"{model} was not trained to look ahead ({reason}), so it can be evaluated only with --modes ar,exact. "
            "Train it with objective: {kind: mars} to compare thresholds."
        )
    if block is not None:
        raise ConfigError(f"block is {block}; {model} does not look ahead, so leave block out.")
    return 1


def threshold_of(name: str) -> float:
    """Return the threshold that the name of a setting ends with, as in "threshold 0.9"."""
    return float(name.removeprefix(f"{Mode.THRESHOLD.value} "))


def _at(threshold: float) -> DecodingSetting:
    try:
        DecodeParams(threshold=threshold)
    except RequestError as error:
        raise ConfigError(str(error)) from None
    return DecodingSetting(mode=Mode.THRESHOLD, threshold=threshold)
