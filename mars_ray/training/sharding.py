"""Shard a network over the workers of a run with FSDP2, and save and load the state of the shards.

Each worker holds its shard of every weight and of that weight's optimizer state. Layers gather their weights for a
forward or a backward and free them afterwards. All other weights (embeddings, final norm) are one group, which stays
gathered from the forward to the end of the backward.

The FSDP of accelerate needs GPUs. `fully_shard` of torch is the same on GPUs and, by gloo, on CPUs.
"""

import warnings
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
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


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
    with torch.device("meta"):
        whole: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(network.config)](network.config)
    whole.load_state_dict(weights, assign=True)
    whole.tie_weights()
    whole.generation_config = network.generation_config
    return whole


def save_shards(folder: Path, network: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Write this worker's shards of the network and of the optimizer's state into `folder`. All workers must call
    this."""
    save(_state(network, optimizer), checkpoint_id=folder)


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
