"""Save and load the state of a run: weights, optimizer and random state of every worker; and shard the weights.

All workers write the folder together. accelerate saves whole weights; torch saves shards, in the folder `shards`. The
file `step.json` holds the step, which is the rest of the state, because rows, phases and learning rate depend only on
the step.

Weights are sharded with FSDP2. Each worker holds its shard of every weight and of that weight's optimizer state. Layers
gather their weights for a forward or a backward and free them afterwards. All other weights (embeddings, final norm)
are one group, which stays gathered from the forward to the end of the backward. The FSDP of accelerate needs GPUs;
`fully_shard` of torch is the same on GPUs and, by gloo, on CPUs.
"""

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from mars_ray.errors import ConfigError
from mars_ray.model.network import empty_network

SHARDS = "shards"


@dataclass(frozen=True, slots=True)
class RunState:
    """Progress of a run."""

    steps: int = 0
    tokens: int = 0
    """Tokens of the clean stream seen so far, without padding."""
    best_steps: int = 0
    """Steps at the best measurement so far; 0 without one."""
    best_tokens_per_forward: float = 0.0


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
        save(_state(trainee.network, trainee.optimizer), checkpoint_id=folder / SHARDS)
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


def shard(network: PreTrainedModel, accelerator: Accelerator) -> None:
    """Replace the weights of `network` by this worker's shards, in place.

    With mixed precision, float32 shards are gathered in bfloat16, and gradients are summed in float32.
    """
    mixed = accelerator.mixed_precision == "bf16" and network.dtype == torch.float32
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed else None,
        reduce_dtype=torch.float32 if mixed else None,
        cast_forward_inputs=False,  # autocast does this
    )
    mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    layers = [module for module in network.modules() if isinstance(module, GradientCheckpointingLayer)]
    for module in (*layers, network):
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        # gloo cannot average, so torch divides after the sum.
        sharded.set_force_sum_reduction_for_comms(accelerator.device.type == "cpu")


def unsharded(network: PreTrainedModel) -> PreTrainedModel | None:
    """Gather a sharded network on the CPU of the first worker; the others get None. All workers must call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(network, options=options)
    if not weights:
        return None
    whole = empty_network(network.config)
    whole.load_state_dict(weights, assign=True)
    whole.tie_weights()
    whole.generation_config = network.generation_config
    return whole


def load_shards(folder: Path, network: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Restore a network and its optimizer from the shards of all workers in `folder`. Now there may be more or fewer
    workers than then, and the network may be whole."""
    state = _state(network, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process has no process group
        load(state, checkpoint_id=folder)
    set_state_dict(network, optimizer, model_state_dict=state["network"], optim_state_dict=state["optimizer"])


def _state(network: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    weights, moments = get_state_dict(network, optimizer)
    return {"network": weights, "optimizer": moments}
