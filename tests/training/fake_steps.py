"""Training steps on a fake GPU, whose tensors have devices, dtypes and shapes but no values.

    LD_PRELOAD=fake_gpu.so python -m tests.training.fake_steps

An operation on tensors of different devices raises an error. So does reading a value, or an operation whose shape
depends on values; on a real GPU the host would wait for either. Prints a line of JSON for each step.
"""

import json
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from transformers import PreTrainedModel

from mars_ray.adapter.gated_lora import new_adapter
from mars_ray.adapter.loss import AdapterLoss
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.method import tiles
from mars_ray.method.loss import StreamLoss
from mars_ray.method.streams import Streams, mars_streams
from mars_ray.training import step
from tests.factories.networks import network_of_rows
from tests.factories.token_rows import MASK_ID, packed

ROWS = packed([[[False] * 5 + [True] * 40, [False, True, True] * 4], [[False] * 3 + [True] * 20]])
READ: list[Tensor] = []


def to_host(figures: Tensor) -> list[float]:
    """Stand in for the one read of a step."""
    READ.append(figures)
    return [1.0] * len(figures)


def loss_of(network: PreTrainedModel, kind: str) -> nn.Module:
    """Return the loss of an adapter or of the whole model."""
    if kind == "whole model":
        return StreamLoss(network, 0.5)
    return AdapterLoss(network, new_adapter(network, rank=3, alpha=6.0, masks=4, names=None), 1.0)


def run_steps(accelerator: Accelerator, kind: str, dtype: torch.dtype, attention: str) -> dict[str, Any]:
    """Run two whole steps of two micro-batches each, and return what the host read and what the optimizer holds."""
    READ.clear()
    real = network_of_rows()
    streams = mask_streams(ROWS, masks=4) if kind == "adapter" else mars_streams(ROWS, block=4, mask_id=MASK_ID)
    tensors = {name: getattr(streams, name) for name in Streams.__slots__ if name != "noisy"}
    with FakeTensorMode() as mode, torch.device("cuda"):
        network = type(real)._from_config(real.config, dtype=dtype, attn_implementation=attention)
        loss = loss_of(network, kind)
        on_host = Streams(noisy=streams.noisy, **{name: mode.from_tensor(one) for name, one in tensors.items()})
        optimizer = torch.optim.AdamW(loss.parameters(), lr=1e-3, fused=True)
        for _ in range(2):
            step.train_step(loss, optimizer, [on_host, on_host], accelerator, ar_weight=1.0, clip_norm=1.0)
    moments = [state["exp_avg"].device.type for state in optimizer.state.values()]
    read = [[figures.device.type, len(figures)] for figures in READ]
    return {"read": read, "moments_on": sorted(set(moments)), "untrained": len(list(loss.parameters())) - len(moments)}


def main() -> None:
    """Run all steps."""
    step.to_host = to_host
    Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[method-assign]  # fake tensors have no pinned memory
    PartialState(cpu=True).device = torch.device("cuda")
    accelerator = Accelerator(cpu=True)
    for attention in ("sdpa", tiles.ATTENTION):
        for dtype in (torch.float32, torch.bfloat16):
            for kind in ("adapter", "whole model"):
                line = {"kind": kind, "dtype": str(dtype), "attention": attention}
                try:
                    line |= run_steps(accelerator, kind, dtype, attention)
                except (DataDependentOutputException, DynamicOutputShapeException) as error:
                    line["waits"] = type(error).__name__
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
