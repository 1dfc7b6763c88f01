"""Adapters that change while an engine runs: every request is decoded with the weights it began with."""

import gc
import weakref
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from mars_ray.adapter.folder import Adapter
from mars_ray.engine.core.adapters import LoadedAdapter
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.kernels.build import WeightLayout
from mars_ray.engine.kernels.packed import Format, pack_weight, quantize_int8, unpack
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request
from mars_ray.errors import RequestError
from mars_ray.model.checkpoint import Checkpoint
from tests.engine.engine_parts import bundled_tokenizer
from tests.engine.test_adapter import fresh, some_adapter
from tests.factories.cards import adapter_card
from tests.factories.engine import Output, collect, engine_of, request, run

KINDS: list[dict[str, Any]] = [
    {"rank": 3, "block": 6},
    {"rank": 40, "block": 3},
    {"names": ["q_proj", "v_proj"], "std": 0.5, "block": 12},
    {"names": ["down_proj"], "block": 20},
]
NAMES = ("a", "b")
DECODING = [
    {"mode": Mode.AR},
    {"mode": Mode.EXACT},
    {"mode": Mode.THRESHOLD, "threshold": 0.0, "block": 5},
    {"mode": Mode.THRESHOLD, "threshold": 0.0},
    {"mode": Mode.THRESHOLD, "threshold": 1.0},
]
"""Below 1, a request with a seed or a block has an answer that does not depend on the load."""
PROMPTS = [tuple(range(20, 60)), tuple(range(20, 70)), (*range(20, 50), 7, 8, 9)]
"""Prompts with common beginnings, so that sequences begin with what others left in the cache."""


@cache
def adapters_of(kernels: bool) -> list[Adapter]:
    checkpoint = fresh(kernels)
    made = []
    for kind in KINDS:
        block = kind["block"]
        adapter = some_adapter(checkpoint, **{name: value for name, value in kind.items() if name != "block"})
        made.append(Adapter(adapter.lora, adapter_card(block=block)))
    return made


@cache
def changing(kernels: bool) -> Engine:
    return engine_of(fresh(kernels), max_num_seqs=3)


@cache
def fixed(kernels: bool, kind: int | None) -> Engine:
    """An engine whose adapter `a` never changes."""
    adapters = {} if kind is None else {"a": adapters_of(kernels)[kind]}
    return engine_of(fresh(kernels), {"adapters": adapters}, max_num_seqs=3)


steps = st.integers(1, 6)
changes = st.dictionaries(st.sampled_from(NAMES), st.integers(0, len(KINDS) - 1))
asked = st.tuples(
    st.sampled_from((None, *NAMES)),
    st.integers(0, len(PROMPTS) - 1),
    st.sampled_from(DECODING),
    st.integers(1, 24),
    st.sampled_from([0.0, 1.2]),
)


@pytest.mark.parametrize("kernels", [True, False])
@given(st.lists(steps | changes | asked, min_size=1, max_size=24))
def test_answers_are_those_of_an_engine_whose_adapters_never_change(kernels: bool, actions: list[Any]) -> None:
    engine = changing(kernels)
    engine.set_adapters({})
    present: dict[str, int] = {}
    outputs: dict[tuple[str, int], Output] = {}
    sent: dict[str, tuple[int | None, Request]] = {}
    for number, action in enumerate(actions):
        match action:
            case int():
                for _ in range(action):
                    collect(outputs, engine.step())
            case dict():
                present = action
                made = adapters_of(kernels)
                engine.set_adapters({name: engine._adapters.pack(made[kind]) for name, kind in present.items()})
            case (name, prompt, decoding, max_tokens, temperature):
                sampling = {"max_tokens": max_tokens, "seed": number, "ignore_eos": True}
                # Sums of torch depend on the batch in their last bits, which decide a draw once in a while.
                sampling["temperature"] = temperature if kernels else 0.0
                wanted = request(number, PROMPTS[prompt], DecodeParams(**decoding, adapter=name), **sampling)
                if name is not None and name not in present:
                    with pytest.raises(RequestError, match=f"adapter is {name!r}; this engine has"):
                        engine.add(wanted)
                    continue
                engine.add(wanted)
                decode = DecodeParams(**decoding, adapter=None if name is None else "a")
                alone = request(number, PROMPTS[prompt], decode, **sampling)
                sent[str(number)] = (None if name is None else present[name], alone)
    while engine.busy:
        collect(outputs, engine.step())
    for id, (kind, alone) in sent.items():
        other = fixed(kernels, kind)
        other.clear_cache()
        assert outputs[id, 0].tokens == run(other, [alone])[id].tokens


@pytest.mark.parametrize("kernels", [True, False])
def test_one_adapter_may_have_two_names(kernels: bool) -> None:
    decode = DecodeParams(threshold=0.0, block=5, adapter="a")
    alone = run(fixed(kernels, 2), [request(0, PROMPTS[0], decode, max_tokens=24, ignore_eos=True)])["0"]
    engine = engine_of(fresh(kernels))
    adapter = adapters_of(kernels)[2]
    engine.set_adapters({name: engine._adapters.pack(adapter) for name in NAMES})
    twice = [
        request(number, PROMPTS[0], replace(decode, adapter=name), max_tokens=24, ignore_eos=True)
        for number, name in enumerate(NAMES)
    ]
    assert [output.tokens for output in run(engine, twice).values()] == [alone.tokens] * 2


def long_request(engine: Engine, name: str) -> None:
    engine.add(request("long", [11, 12], DecodeParams(mode=Mode.EXACT, adapter=name), max_tokens=64, ignore_eos=True))
    engine.step()


@pytest.mark.parametrize("kernels", [True, False])
def test_a_dropped_adapter_is_freed_when_its_last_request_has_ended(kernels: bool) -> None:
    engine = engine_of(fresh(kernels))

    def packed() -> LoadedAdapter:
        return engine._adapters.pack(some_adapter(fresh(kernels)))

    adapter = packed()
    engine.set_adapters({"a": adapter})
    long_request(engine, "a")
    lora: Any = adapter.packed.lora  # type: ignore[attr-defined]
    weights = weakref.ref(lora.tensors[0] if kernels else lora)
    del lora
    del adapter
    engine.set_adapters({"b": packed()})
    gc.collect()
    assert weights() is not None
    engine.step()
    engine.cancel("long")
    gc.collect()
    assert weights() is None


def test_torch_keeps_no_hook_of_an_adapter_that_is_gone() -> None:
    engine = engine_of(fresh(kernels=False))
    network = engine._checkpoint.network
    engine.set_adapters({"a": engine._adapters.pack(some_adapter(fresh(False)))})
    assert any(module._forward_hooks for module in network.modules())
    engine.set_adapters({})
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())


def test_the_largest_block_grows_with_the_adapters_and_the_profile_with_it() -> None:
    checkpoint = fresh(kernels=True)
    engine = engine_of(checkpoint)
    before = engine.block
    long_request_adapter = Adapter(some_adapter(checkpoint).lora, adapter_card(block=2 * before))
    engine.set_adapters({"a": engine._adapters.pack(long_request_adapter)})
    assert engine.block == 2 * before
    run(engine, [request("x", [11, 12], DecodeParams(adapter="a", threshold=0.0), max_tokens=64, ignore_eos=True)])
    assert {len(point.tokens) for point in engine.state().profile} == {2 * before}


@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_that_comes_after_the_weights_were_freed_works_as_one_that_came_before(
    quantize: Any, dtype: torch.dtype, family: str
) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=300,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    answers = []
    for consume in (False, True):
        torch.manual_seed(0)
        network = LlamaForCausalLM(config).eval().to(dtype)
        checkpoint = Checkpoint(network, bundled_tokenizer(), 299, None)
        adapter = some_adapter(checkpoint, std=0.3)
        engine = Engine(checkpoint, EngineOptions(quantize=quantize), consume=consume)
        assert network.get_output_embeddings().weight.is_meta == consume
        engine.set_adapters({"a": engine._adapters.pack(adapter)})
        decode = DecodeParams(threshold=0.0, block=5, adapter="a")
        answers.append(run(engine, [request(n, [n + 3, 8], decode, max_tokens=40) for n in range(4)]))
    if quantize is None:  # else the head of the second engine is rounded
        assert {id: each.tokens for id, each in answers[0].items()} == {
            id: each.tokens for id, each in answers[1].items()
        }
    assert all(output.tokens for output in answers[1].values())


@given(st.sampled_from([8, 16, 32]), st.booleans(), st.sampled_from([0, 128]), st.integers(1, 70), st.integers(1, 3))
def test_an_unpacked_weight_is_the_weight(columns: int, pairs: bool, offset: int, outputs: int, groups: int) -> None:
    layout = WeightLayout(columns, pairs, offset)
    weight = torch.randn(outputs, 64 * groups)
    assert torch.equal(unpack(pack_weight(weight, None, Format.FLOAT32, layout), layout)[:outputs], weight)
    narrow = weight.bfloat16()
    assert torch.equal(unpack(pack_weight(narrow, None, Format.BFLOAT16, layout), layout)[:outputs], narrow)
    number, scale = quantize_int8(weight)
    rounded = (number.float() * scale.float()[..., None]).flatten(1)
    assert torch.equal(unpack(pack_weight(weight, None, Format.INT8, layout), layout)[:outputs], rounded)
