"""Resolve what decodes, once: the model, its adapter if any, and the card that calibrates them.

In:    the names of a model and an adapter.
Out:   a `DecodingModel`, which is handed on.
Never: accepts an adapter of a model with other tokens, or loads weights.
"""

from dataclasses import dataclass
from pathlib import Path

from mars_ray.adapter.card import AdapterCard, check_vocabulary, read_adapter_card, resolve_adapter
from mars_ray.model.card import Card
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.model.folder import ResolvedModel, open_model


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingModel:
    """A checked model, with its adapter if any."""

    base: ResolvedModel
    adapter: Path | None
    """Absolute folder of the adapter."""
    card: Card | AdapterCard | None
    """Card with the block size and the calibration: the adapter's, or the model's if there is no adapter."""


def open_decoding_model(
    model: str, adapter: str | None, dtype: DtypeOrAuto = "auto", device: str = "cpu"
) -> DecodingModel:
    """Find and check a model and its adapter; dtype "auto" depends on `device`.

    Raises `ModelError` for an unusable model, and `AdapterError` for an adapter that is unknown or of other tokens.
    """
    base = open_model(model, dtype, device)
    folder = resolve_adapter(adapter)
    if folder is None:
        return DecodingModel(base=base, adapter=None, card=base.card)
    card = read_adapter_card(folder)
    check_vocabulary(card, folder, base.folder)
    return DecodingModel(base=base, adapter=folder, card=card)
