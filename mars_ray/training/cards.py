"""Make the card of the model or adapter that a run has trained."""

from pathlib import Path
from typing import Any

from mars_ray.adapter.card import AdapterCard
from mars_ray.data.packed import PackedData
from mars_ray.model.card import Card, library_versions
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.model.digest import folder_digest, weights_digest
from mars_ray.model.resolve import model_label
from mars_ray.training.checkpoint import RunState
from mars_ray.training.config import TrainConfig


def model_card(
    config: TrainConfig,
    base: Path,
    checkpoint: Checkpoint,
    data: PackedData,
    state: RunState,
    losses: dict[str, float],
) -> Card:
    """Return the card of a model trained with the settings `config` from the model in `base`."""
    objective = config.objective
    mars = objective.kind == "mars"
    return Card(
        method=objective.kind,
        block=objective.block if mars else None,
        objective=objective.model_dump(exclude={"kind", "block", "adapter"}) if mars else {},
        mask_token=checkpoint.tokenizer.convert_ids_to_tokens(checkpoint.mask_id),
        mask_token_id=checkpoint.mask_id,
        **_of_the_run(config, base, data, state, losses),
    )


def adapter_card(
    config: TrainConfig, base: Path, data: PackedData, state: RunState, losses: dict[str, float]
) -> AdapterCard:
    """Return the card of an adapter trained with the settings `config` for the model in `base`."""
    objective = config.objective
    init = objective.adapter.init if objective.adapter else None
    return AdapterCard(
        block=objective.block,
        objective=objective.model_dump(include={"growth", "phase", "decay", "distill"}),
        base_digest=weights_digest(base),
        init_digest=folder_digest(Path(init)) if init else None,
        **_of_the_run(config, base, data, state, losses),
    )


def _of_the_run(
    config: TrainConfig, base: Path, data: PackedData, state: RunState, losses: dict[str, float]
) -> dict[str, Any]:
    """Return the fields that both kinds of card share."""
    return {
        "base_model": model_label(config.model, base),
        "data": config.data.train.name,
        "examples": data.report.examples,
        "tokens": state.tokens,
        "steps": state.steps,
        "seed": config.seed,
        "versions": library_versions(),
        "losses": losses,
    }
