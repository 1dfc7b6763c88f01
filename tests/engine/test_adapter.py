"""An engine with an adapter: masks are decoded with it, tokens with the base alone."""

from typing import Any

import pytest
import torch
from torch import nn

from mars_ray.adapter.folder import Adapter, AdapterCard
from mars_ray.adapter.gated_lora import GatedLoRA, LoraShape, linears_of
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.execution.input_packer import ForwardBatch, InputPacker
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams
from mars_ray.engine.scheduling.scheduler import ScheduledSequence
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model
from tests.engine.engine_parts import sequence_of
from tests.engine_samples import request, run

CARD = AdapterCard(
    block=6,
    objective={},
    base_model="bundled",
    base_digest="",
    data="",
    examples=1,
    tokens=1,
    steps=1,
    seed=0,
    versions={},
    losses={},
)


def some_adapter(checkpoint: Checkpoint, names: list[str] | None = None, rank: int = 5) -> Adapter:
    torch.manual_seed(0)
    network = checkpoint.network
    shape = LoraShape(rank=rank, alpha=10.0, masks=4, linears=linears_of(network, names))
    lora = GatedLoRA(shape, network.config.hidden_size)
    for parameter in lora.parameters():
        nn.init.normal_(parameter, std=0.1)
    return Adapter(lora.requires_grad_(False).eval(), CARD)


def fresh(kernels: bool, dtype: torch.dtype = torch.float32) -> Checkpoint:
    checkpoint = load_checkpoint(resolve_model("bundled"), dtype=dtype)
    if not kernels:
        checkpoint.network.__class__ = type("Unknown", (type(checkpoint.network),), {})
    return checkpoint


def engine_of(kernels: bool, adapter: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    checkpoint = fresh(kernels, dtype)
    chosen = some_adapter(checkpoint, **adapter) if adapter is not None else None
    engine = Engine(checkpoint, EngineOptions(compiled=False, **options), adapter=chosen)
    engine._cache.resize(4, 64)
    return engine


def step_with_masks(rows: tuple[int, ...]) -> ForwardBatch:
    batch = [
        ScheduledSequence(sequence_of([11, 12, 13, 14], slot=0, drafts=[15, 16]), 4, rows),
        ScheduledSequence(sequence_of([21, 22], slot=1), 2, (3,)),
        ScheduledSequence(sequence_of([31, 32, 33], slot=2), 3),
    ]
    mask_id = fresh(kernels=True).mask_id
    packed, _ = InputPacker(mask_id, 64, torch.device("cpu")).pack(batch, 3, audit=True)
    return packed


@pytest.mark.parametrize("names", [None, ["q_proj", "v_proj"], ["down_proj"]], ids=str)
@pytest.mark.parametrize("rows", [(0, 0, 5), (5, 5, 5), (2, 0, 4)], ids=str)
def test_kernels_and_torch_say_the_same_with_an_adapter(names: list[str] | None, rows: tuple[int, ...]) -> None:
    given: dict[str, Any] = {"names": names}
    batch = step_with_masks(rows)
    one, other = (engine_of(kernels, given)._runner.run(batch).logits_MV for kernels in (True, False))
    torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_and_drafts_have_the_logits_of_the_base_bit_for_bit(kernels: bool, dtype: torch.dtype) -> None:
    batch = step_with_masks((5, 5, 5))
    base = engine_of(kernels, None, dtype)._runner.run(batch).logits_MV
    adapted = engine_of(kernels, {}, dtype)._runner.run(batch).logits_MV
    is_mask = batch.offset_N[batch.pick_M] >= 0
    assert torch.equal(adapted[~is_mask], base[~is_mask])
    assert not torch.isclose(adapted[is_mask], base[is_mask]).all(dim=1).any()


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_exact_mode_says_what_the_base_says_one_token_at_a_time(
    kernels: bool, quantize: str | None, prompts: list[tuple[int, ...]]
) -> None:
    if quantize and not kernels:
        pytest.skip("weights are rounded for kernels alone")
    chosen = prompts[::24]
    plain = [request(n, prompt, DecodeParams(mode=Mode.AR), max_tokens=24) for n, prompt in enumerate(chosen)]
    ahead = [request(n, prompt, DecodeParams(mode=Mode.EXACT), max_tokens=24) for n, prompt in enumerate(chosen)]
    alone = run(engine_of(kernels, quantize=quantize), plain)
    said = run(engine_of(kernels, {}, quantize=quantize), ahead)
    assert {name: each.tokens for name, each in said.items()} == {name: each.tokens for name, each in alone.items()}


def test_the_block_is_that_of_the_adapter() -> None:
    assert engine_of(True, {}).block == CARD.block


def test_an_engine_that_is_closed_leaves_the_network_without_the_adapter() -> None:
    engine = engine_of(False, {})
    hooks = [module for module in engine._checkpoint.network.modules() if module._forward_hooks]
    assert hooks
    engine.close()
    assert not any(module._forward_hooks for module in hooks)
