"""An engine with an adapter: masks are decoded with it, tokens with the base alone."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mars_ray.adapter.card import unnamed
from mars_ray.adapter.folder import Adapter
from mars_ray.adapter.gated_lora import GatedLoRA, LoraShape, linears_of
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.execution.input_packer import InputPacker
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import Quantize
from mars_ray.engine.request import DecodeParams
from mars_ray.engine.scheduling.scheduler import ScheduledSequence
from mars_ray.errors import RequestError
from mars_ray.model.checkpoint import Checkpoint
from tests.engine.engine_parts import sequence_of
from tests.factories.cards import adapter_card
from tests.factories.engine import as_unknown, bundled_checkpoint, engine_of, request, run


def some_adapter(
    checkpoint: Checkpoint,
    names: list[str] | None = None,
    rank: int = 5,
    std: float = 0.1,
    *,
    products_overflow: bool = False,
) -> Adapter:
    torch.manual_seed(0)
    network = checkpoint.network
    shape = LoraShape(rank=rank, alpha=10.0, masks=4, linears=linears_of(network, names))
    lora = GatedLoRA(shape, network.config.hidden_size)
    for parameter in lora.parameters():
        nn.init.normal_(parameter, std=std)
    lora.requires_grad_(False)
    if products_overflow:
        for pair in lora.factors.values():
            pair.a.mul_(1e4)
            pair.b.mul_(1e37)
    return Adapter(lora.eval(), adapter_card(block=6))


def fresh(kernels: bool, dtype: torch.dtype = torch.float32) -> Checkpoint:
    checkpoint = bundled_checkpoint(dtype=dtype)
    return checkpoint if kernels else as_unknown(checkpoint)


def adapted_engine(kernels: bool, adapter: Any = None, dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    checkpoint = fresh(kernels, dtype)
    chosen = some_adapter(checkpoint, **adapter) if adapter is not None else None
    engine = engine_of(checkpoint, {"adapters": unnamed(chosen)}, **options)
    engine._forwards.cache.resize(4, 64)
    return engine


def step_with_masks(rows: tuple[int, ...]) -> ForwardBatch:
    batch = [
        ScheduledSequence(sequence_of([11, 12, 13, 14], slot=0, drafts=[15, 16]), 4, rows),
        ScheduledSequence(sequence_of([21, 22], slot=1), 2, (3,)),
        ScheduledSequence(sequence_of([31, 32, 33], slot=2), 3),
    ]
    mask_id = fresh(kernels=True).mask_id
    packed, _ = InputPacker(mask_id, torch.device("cpu"), lambda _: 0).pack(batch, audit=True)
    return packed


@pytest.mark.parametrize("names", [None, ["q_proj", "v_proj"], ["down_proj"]], ids=str)
@pytest.mark.parametrize("rows", [(0, 0, 5), (5, 5, 5), (2, 0, 4)], ids=str)
def test_kernels_and_torch_say_the_same_with_an_adapter(names: list[str] | None, rows: tuple[int, ...]) -> None:
    given: dict[str, Any] = {"names": names}
    batch = step_with_masks(rows)
    one, other = (adapted_engine(kernels, given)._forwards.runner.run(batch).logits_MV for kernels in (True, False))
    torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masks_of_a_rounded_model_have_nearly_the_logits_of_the_model(dtype: torch.dtype) -> None:
    batch = step_with_masks((5, 5, 5))
    engines = (adapted_engine(False, {}), adapted_engine(True, {}, dtype, quantize="int8"))
    plain, rounded = (engine._forwards.runner.run(batch).logits_MV for engine in engines)
    is_mask = batch.offset_N[batch.pick_M] >= 0
    plain, rounded = (logits_MV[is_mask].nan_to_num(neginf=0) for logits_MV in (plain, rounded))
    assert torch.cosine_similarity(plain, rounded).min() > 0.99


def test_a_packed_adapter_is_the_smaller_the_fewer_its_ranks() -> None:
    sizes = []
    for rank in (4, 64):
        runner: Any = adapted_engine(True, None, quantize="int8")._forwards.runner
        sizes.append(runner.pack(some_adapter(fresh(kernels=True), rank=rank).lora).lora.nbytes)
    assert 4 * sizes[0] < sizes[1]


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tokens_and_drafts_have_the_logits_of_the_base_bit_for_bit(kernels: bool, dtype: torch.dtype) -> None:
    batch = step_with_masks((5, 5, 5))
    base = adapted_engine(kernels, None, dtype)._forwards.runner.run(batch).logits_MV
    adapted = adapted_engine(kernels, {}, dtype)._forwards.runner.run(batch).logits_MV
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
    alone = run(adapted_engine(kernels, quantize=quantize), plain)
    said = run(adapted_engine(kernels, {}, quantize=quantize), ahead)
    assert {name: each.tokens for name, each in said.items()} == {name: each.tokens for name, each in alone.items()}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_beside_masks_whose_products_overflow_has_the_logits_of_the_base(
    kernels: bool, dtype: torch.dtype
) -> None:
    packer = InputPacker(fresh(kernels=True).mask_id, torch.device("cpu"), lambda _: 0)
    batch, _ = packer.pack([ScheduledSequence(sequence_of([11], slot=0), 1, (12,))], audit=False)
    base = adapted_engine(kernels, None, dtype)._forwards.runner.run(batch).logits_MV
    adapted = adapted_engine(kernels, {"products_overflow": True}, dtype)._forwards.runner.run(batch).logits_MV
    assert adapted[1:].isnan().any(dim=1).all()
    assert torch.equal(adapted[0], base[0])


@pytest.mark.parametrize("kernels", [True, False])
def test_exact_answers_with_an_adapter_whose_products_overflow_are_those_of_the_base(
    kernels: bool, prompts: list[tuple[int, ...]]
) -> None:
    plain, ahead = (request(0, prompts[0], DecodeParams(mode=mode), max_tokens=24) for mode in (Mode.AR, Mode.EXACT))
    alone = run(adapted_engine(kernels), [plain])["0"]
    said = run(adapted_engine(kernels, {"products_overflow": True}), [ahead])["0"]
    assert any(chunk.masks for chunk in said.chunks)
    assert said.tokens == alone.tokens


def test_the_block_is_that_of_the_adapter() -> None:
    assert adapted_engine(True, {}).block == 6


def test_an_engine_that_is_closed_leaves_the_network_without_the_adapter() -> None:
    engine = adapted_engine(False, {})
    hooks = [module for module in engine._checkpoint.network.modules() if module._forward_hooks]
    assert hooks
    engine.close()
    assert not any(module._forward_hooks for module in hooks)


KINDS: dict[str | None, dict[str, Any]] = {
    None: {"rank": 3},
    "wide": {"rank": 40},
    "attention": {"names": ["q_proj", "v_proj"], "std": 0.5},
    "mlp": {"names": ["down_proj"]},
}


@cache
def engine_of_several(kernels: bool, quantize: Quantize | None = None) -> Engine:
    """An engine with adapters of several kinds; it serves all examples."""
    checkpoint = fresh(kernels)
    adapters = {name: some_adapter(checkpoint, **given) for name, given in KINDS.items()}
    return engine_of(checkpoint, {"adapters": adapters}, max_num_seqs=4, quantize=quantize)


@pytest.mark.parametrize("kernels", [True, False])
def test_masks_of_several_adapters_in_one_step_are_those_of_each_alone(kernels: bool) -> None:
    checkpoint = fresh(kernels)
    mixed = engine_of_several(kernels)
    mixed._forwards.cache.resize(4, 64)
    sequences = [
        sequence_of([11 + number, 12, 13], id=number, slot=number, decode=DecodeParams(adapter=name))
        for number, name in enumerate(("mlp", None, "wide", "mlp"))
    ]
    batch = [ScheduledSequence(sequence, 3, (4,)) for sequence in sequences]

    def logits(engine: Engine, adapter_of: Any) -> Any:
        packer = InputPacker(checkpoint.mask_id, torch.device("cpu"), adapter_of)
        return engine._forwards.runner.run(packer.pack(batch, audit=False)[0]).logits_MV

    for sequence in sequences:
        mixed._adapters.begin(sequence.request)
    together = logits(mixed, mixed._adapters.number)
    for sequence in sequences:
        mixed._adapters.end(sequence.request.id)
    for number, sequence in enumerate(sequences):
        given = KINDS[sequence.request.decode.adapter]
        alone = logits(adapted_engine(kernels, given), lambda _: 0)
        rows = slice(5 * number, 5 * number + 5)
        torch.testing.assert_close(together[rows], alone[rows], atol=1e-4, rtol=1e-4)


GRAMMARS = (
    None,
    GrammarSpec(kind="regex", text="[a-z ]{3,40}"),
    GrammarSpec(kind="regex", text="(yes|no|maybe)( (yes|no|maybe)){1,6}"),
)


@st.composite
def asked(draw: st.DrawFn) -> tuple[str | None, dict[str, Any]]:
    """An adapter, and how tokens are chosen."""
    return draw(st.sampled_from(list(KINDS))), {
        "max_tokens": draw(st.integers(1, 24)),
        "temperature": draw(st.sampled_from([0.0, 0.7, 1.5])),
        "top_p": draw(st.sampled_from([1.0, 0.9])),
        "seed": draw(st.integers(0, 99)),
        "frequency_penalty": draw(st.sampled_from([0.0, 0.6])),
        "repetition_penalty": draw(st.sampled_from([1.0, 1.3])),
        "grammar": draw(st.sampled_from(GRAMMARS)),
    }


@pytest.mark.parametrize(("kernels", "quantize"), [(True, None), (True, "int8"), (False, None)])
@given(st.lists(asked(), min_size=1, max_size=6), st.sampled_from([None, 2, 5]), st.sampled_from([None, 0.0]))
def test_exact_answers_of_any_mixture_of_adapters_are_those_of_the_base(
    kernels: bool,
    quantize: Quantize | None,
    prompts: list[tuple[int, ...]],
    several: list[tuple[str | None, dict[str, Any]]],
    block: int | None,
    threshold: float | None,
) -> None:
    engine = engine_of_several(kernels, quantize)
    said: list[dict[Any, list[int]]] = []
    for exact in (False, True):
        requests = [
            request(
                number,
                prompts[7 * number],
                DecodeParams(mode=Mode.EXACT, adapter=name, block=block, threshold=threshold)
                if exact
                else DecodeParams(mode=Mode.AR),
                **sampling,
            )
            for number, (name, sampling) in enumerate(several)
        ]
        engine.clear_cache()
        said.append({name: each.tokens for name, each in run(engine, requests).items()})
    assert said[1] == said[0]


def test_an_adapter_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match="adapter is 'other'; this engine has wide, attention, mlp"):
        engine_of_several(True).add(request("a", [1, 2], DecodeParams(adapter="other")))


def test_a_base_that_knows_no_masks_decodes_without_them_where_no_adapter_is_named() -> None:
    checkpoint = replace(fresh(True), card=None)
    adapters: dict[str | None, Adapter] = {"only": some_adapter(checkpoint)}
    engine = engine_of(checkpoint, {"adapters": adapters})
    plain = request("plain", [11, 12], DecodeParams(mode=Mode.EXACT), max_tokens=6, ignore_eos=True)
    ahead = request("ahead", [11, 13], DecodeParams(mode=Mode.EXACT, adapter="only"), max_tokens=6, ignore_eos=True)
    said = run(engine, [plain, ahead])
    assert not any(chunk.masks for chunk in said["plain"].chunks)
    assert any(chunk.masks for chunk in said["ahead"].chunks)
