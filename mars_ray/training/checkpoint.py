"""Save and load the state of a run: weights, optimizer and random state of every worker.

All workers write the folder together. accelerate saves whole weights; torch saves shards, in the folder `shards`. The
file `step.json` holds the step, which is the rest of the state, because rows, phases and learning rate depend only on
the step.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from mars_ray.errors import ConfigError
from mars_ray.training.sharding import load_shards, save_shards

SHARDS = "shards"


@dataclass(frozen=True, slots=True)
class RunState:
    """Progress of a run."""

    steps: int = 0
    tokens: int = 0
    """Tokens of the clean stream seen so far, without padding."""


@dataclass(frozen=True, slots=True)
class Trainee:
    """The weights that a run trains, and their optimizer."""

    network: PreTrainedModel
    """The network, or the base of an adapter, which accelerate saves."""
    optimizer: torch.optim.Optimizer
    sharded: bool
    """Whether the trained weights are sharded; otherwise accelerate has prepared them."""


def save_state(folder: Path, state: RunState, trainee: Trainee, accelerator: Accelerator) -> None:
    """Write this worker's part of a checkpoint into `folder`."""
    accelerator.save_state(str(folder))
    if trainee.sharded:
        save_shards(folder / SHARDS, trainee.network, trainee.optimizer)
    if accelerator.is_main_process:
        (folder / "step.json").write_text(json.dumps(asdict(state)) + "\n")


def load_state(folder: Path, trainee: Trainee, accelerator: Accelerator) -> RunState:
    """Restore weights, optimizer and random state; return the progress of the run.

    A state of shards also loads into whole weights, but then without the random state. Raises `ConfigError` if a state
    of whole weights should load into shards.
    """
    stored_shards = (folder / SHARDS).exists()
    if stored_shards:
        load_shards(folder / SHARDS, trainee.network, trainee.optimizer)
    elif trainee.sharded:
        raise ConfigError(
            "compute.sharding is fsdp, but the run was saved with ddp, which fsdp cannot load. Continue with ddp, or "
            "choose another output."
        )
    if stored_shards == trainee.sharded:
        accelerator.load_state(str(folder))
    return RunState(**json.loads((folder / "step.json").read_text()))
