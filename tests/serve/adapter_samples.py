"""Adapters of the bundled model in folders."""

from pathlib import Path

from mars_ray.adapter.folder import save_adapter
from mars_ray.model.resolve import resolve_model
from tests.engine.test_adapter import some_adapter
from tests.factories.cards import adapter_card
from tests.factories.engine import bundled_checkpoint


def saved_adapter(folder: Path, rank: int) -> str:
    """Write an adapter of the bundled model with random weights, and return its folder."""
    card = adapter_card(resolve_model("bundled"), block=6)
    save_adapter(some_adapter(bundled_checkpoint(), rank=rank).lora, card, folder)
    return str(folder)
