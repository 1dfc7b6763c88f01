"""The compiled kernels: they say what the network says, and a position's logits depend on its tokens alone."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.execution.cpu_runner import CPURunner
from mars_ray.engine.execution.torch_runner import TorchRunner
from mars_ray.engine.kernels.build import kernel_library
from mars_ray.engine.kernels.decoder import FusedDecoder
from mars_ray.engine.kernels.families import KernelError
from mars_ray.engine.kernels.packed import quantize_int4, quantize_int8
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.kv.forward_batch import ForwardBatch, SlotSpan
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions, Quantize
from mars_ray.engine.request import DecodeParams
from mars_ray.errors import ModelError
from mars_ray.model.checkpoint import Checkpoint
from tests.engine.test_adapter import some_adapter
from tests.factories.engine import bundled_checkpoint, run
from tests.factories.engine import request as ask

try:
    kernel_library()
except KernelError as reason:
    pytest.skip(f"no kernels here: {reason}", allow_module_level=True)

SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 117,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
MASK_ID = 116
CONFIGS = {
    "llama, tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral with a window": MistralConfig(**SIZES, sliding_window=11),
    "qwen2 with a window": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=7, layer_types=["full_attention", *2 * ["sliding_attention"]]
    ),
    "qwen3": Qwen3Config(**SIZES),
    "phi3": Phi3Config(**SIZES, pad_token_id=None),
    "phi3 with a window, partly rotated": Phi3Config(
        **SIZES | {"head_dim": 64}, pad_token_id=None, sliding_window=9, partial_rotary_factor=0.5
    ),
    "gemma": GemmaConfig(**SIZES),
    "gemma2": Gemma2Config(**SIZES, sliding_window=7, query_pre_attn_scalar=20, attn_logit_softcapping=3.0),
    "gemma2 without caps": Gemma2Config(
        **SIZES, attention_bias=True, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gemma3": Gemma3TextConfig(
        **SIZES, sliding_window=7, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "one key head for 32": LlamaConfig(**SIZES | {"num_attention_heads": 32, "num_key_value_heads": 1}),
    "sizes of 32 numbers": LlamaConfig(**SIZES | {"hidden_size": 96, "intermediate_size": 160}),
    "heads of 64": LlamaConfig(**SIZES | {"head_dim": 64}),
    "heads of 96": LlamaConfig(**SIZES | {"head_dim": 96}),
    "heads of 128": LlamaConfig(**SIZES | {"head_dim": 128}),
    "heads of 256": LlamaConfig(**SIZES | {"head_dim": 256}),
}
FORMATS: list[tuple[torch.dtype, Quantize | None]] = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float32, "int8"),
    (torch.bfloat16, "int4"),
]


def network_of(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    network: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in network.named_parameters():
        if "bias" in name or "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return network.to(dtype).eval()


class Stand:
    """A decoder over a cache of a few slots."""

    def __init__(self, network: PreTrainedModel, quantize: Quantize | None = None, *, consume: bool = False) -> None:
        self.decoder = FusedDecoder(network, mask_id=MASK_ID, quantize=quantize, consume=consume)
        self.cache = SlotKVCache(network.config, network.dtype, network.device)
        self.cache.resize(5, 128)
        self.threads = 1

    def forward(self, *parts: tuple[int, int, Tensor]) -> Tensor:
        """Logits of all positions, for slots that go on from a position with these tokens."""
        ids = torch.cat([tokens for _, _, tokens in parts])
        slots = torch.cat([torch.full_like(tokens, slot) for slot, _, tokens in parts])
        positions = torch.cat([torch.arange(len(tokens)) + start for _, start, tokens in parts])
        batch = causal_batch(ids, slots, positions)
        return self.decoder.forward(self.cache.layers, batch, threads=self.threads)[2]


def causal_batch(id_N: Tensor, slot_N: Tensor, position_N: Tensor) -> ForwardBatch:
    """A batch without masks whose logits are all read."""
    number_N, none_N = torch.arange(len(id_N)), torch.full_like(id_N, -1)
    return ForwardBatch(
        id_N=id_N,
        slot_N=slot_N,
        position_N=position_N,
        target_N=position_N,
        prefix_N=position_N + 1,
        behind_N=torch.zeros_like(id_N),
        offset_N=none_N,
        adapter_N=none_N,
        pick_M=number_N,
        spans=[SlotSpan(0, len(id_N), len(id_N))],
        kv_tokens=0,
    )


def rounded_to_int4(weight: Tensor) -> Tensor:
    number, scale, multiplier, offset = (each.float() for each in quantize_int4(weight))
    halves = number.unflatten(2, (2, 32)) * multiplier[..., None] - offset[..., None]
    assert not (halves.abs() > 127).any()
    return (halves.flatten(2) * scale[..., None]).flatten(1)


def some_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(MASK_ID, (count,), generator=torch.Generator().manual_seed(seed))


def expected_logits(network: PreTrainedModel, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = network(tokens[None]).logits[0].float()
    logits[:, MASK_ID] = -torch.inf
    return logits


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_network(name: str, family: str) -> None:
    network, tokens = network_of(CONFIGS[name]), some_tokens(50)
    torch.testing.assert_close(
        Stand(network).forward((1, 0, tokens)), expected_logits(network, tokens), atol=2e-4, rtol=0
    )


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gemma2", "gemma3"])
def test_logits_in_bfloat16_are_as_near_to_float32_as_those_of_the_network(name: str, family: str) -> None:
    tokens, network = some_tokens(100), network_of(CONFIGS[name], torch.bfloat16)
    found, theirs = Stand(network).forward((0, 0, tokens)), expected_logits(network, tokens)
    exact = expected_logits(network.float(), tokens)
    real = exact > -torch.inf
    assert (found - exact)[real].square().mean() <= 1.2 * (theirs - exact)[real].square().mean()


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_logits_are_near_those_of_a_network_with_rounded_weights(quantize: Quantize, family: str) -> None:
    # Rounded inputs change the logits of a wide random network more, so this one is as narrow as groups allow.
    narrow = SIZES | {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    network = network_of(LlamaConfig(**narrow, attention_bias=True, mlp_bias=True))
    tokens = some_tokens(60)
    found = Stand(network, quantize).forward((0, 0, tokens))
    with torch.no_grad():
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Linear) and quantize == "int4" and "head" not in name:
                layer.weight.copy_(rounded_to_int4(layer.weight))
            elif isinstance(layer, nn.Linear):
                rounded, scales = quantize_int8(layer.weight)
                layer.weight.copy_((rounded * scales.float()[..., None]).flatten(1))
    expected = expected_logits(network, tokens)
    real = expected > -torch.inf
    # What is left is the rounding of the inputs to 8 bits, in 13 layers.
    assert (found - expected)[real].std() < 0.05 * expected[real].std()


@given(
    data=st.data(),
    kind=st.sampled_from(FORMATS),
    name=st.sampled_from(["qwen2 with a window", "phi3 with a window, partly rotated", "gemma2", "gemma3"]),
)
def test_a_position_has_the_same_logits_bit_for_bit_whatever_stands_beside_it(
    family: str, data: st.DataObject, kind: tuple[torch.dtype, Quantize | None], name: str
) -> None:
    dtype, quantize = kind
    stand, tokens = Stand(network_of(CONFIGS[name], dtype), quantize), some_tokens(40)
    alone = torch.cat([stand.forward((0, place, tokens[place : place + 1])) for place in range(40)])
    cuts = sorted(data.draw(st.sets(st.integers(1, 39), max_size=4)) | {0, 40})
    slot, start = data.draw(st.integers(0, 4)), 0
    stand.threads = data.draw(st.integers(1, 2))
    for start, end in pairwise(cuts):
        others = [(other, 0, some_tokens(data.draw(st.integers(1, 30)), other)) for other in range(5) if other != slot]
        shown = data.draw(st.permutations([(slot, start, tokens[start:end]), *others[: data.draw(st.integers(0, 4))]]))
        found = stand.forward(*shown)
        first = sum(len(part[2]) for part in shown[: [part[0] for part in shown].index(slot)])
        assert torch.equal(found[first : first + end - start], alone[start:end])


@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_logits_are_read_after_every_thread_has_computed_its_positions(name: str, family: str) -> None:
    stand, tokens = Stand(network_of(CONFIGS[name])), some_tokens(39)
    batch = causal_batch(tokens, torch.zeros_like(tokens), torch.arange(39))
    whole = stand.decoder.forward(stand.cache.layers, batch)[2]
    # The first of two threads computes 19 positions, and then the logits of the last of the 20 of the second thread.
    pick_M = torch.tensor([38, 0, 1])
    for _ in range(8):
        found = stand.decoder.forward(stand.cache.layers, replace(batch, pick_M=pick_M), threads=2)[2]
        assert torch.equal(found, whole[pick_M])


@pytest.mark.parametrize(("dtype", "quantize"), FORMATS)
def test_in_exact_mode_an_engine_says_what_it_says_one_token_at_a_time(
    dtype: torch.dtype, quantize: Quantize | None, prompts: list[tuple[int, ...]], family: str
) -> None:
    checkpoint = bundled_checkpoint(dtype=dtype)
    said = []
    for mode in (Mode.AR, Mode.EXACT):
        engine = Engine(checkpoint, EngineOptions(quantize=quantize))
        asked = [ask(n, prompt, DecodeParams(mode=mode), max_tokens=30) for n, prompt in enumerate(prompts[::12])]
        said.append({name: output.tokens for name, output in run(engine, asked).items()})
    assert said[0] == said[1]


def test_the_mask_is_never_the_likeliest_token_and_has_no_probability(family: str) -> None:
    network = network_of(CONFIGS["llama with biases"])
    with torch.no_grad():
        network.get_output_embeddings().weight[MASK_ID] *= 100
    stand, tokens = Stand(network), some_tokens(30)
    ids, confidences, logits, _ = stand.decoder.forward(
        stand.cache.layers, causal_batch(tokens, torch.zeros_like(tokens), torch.arange(30))
    )
    assert ids == expected_logits(network, tokens).argmax(dim=1).tolist()
    torch.testing.assert_close(torch.tensor(confidences), logits.softmax(dim=1).amax(dim=1))
    assert (logits[:, MASK_ID] == -torch.inf).all()


@given(
    numbers=st.lists(st.floats(-1e4, 1e4, width=32), min_size=64, max_size=64), spread=st.sampled_from([0.0, 1.0, 1e-6])
)
@example(numbers=[132.0, *[0.0] * 63], spread=1e-6)
@example(numbers=[1.0, *[0.0] * 63], spread=1e-6)
@example(numbers=[1e-3, *[0.0] * 63], spread=1e-6)
def test_rounded_weights_are_near_the_weights(numbers: list[float], spread: float) -> None:
    weight = torch.tensor([numbers]) * spread
    number, scale = quantize_int8(weight)
    rounded = (number * scale.float()[..., None]).flatten(1)
    assert ((rounded - weight).abs() <= weight.abs().max() / 127 * 0.6 + 1e-6).all()
    # The ends of a range are rounded, too.
    halves = weight.view(2, 32)
    step = ((halves.amax(dim=1).clamp(min=0) - halves.amin(dim=1).clamp(max=0)) / 15).max()
    assert ((rounded_to_int4(weight) - weight).abs() <= 1.01 * step + 1e-6).all()


def test_a_weight_that_is_no_number_is_not_rounded_to_one() -> None:
    weight = torch.ones(1, 128)
    weight[0, 70] = torch.nan
    rounded = rounded_to_int4(weight)
    assert (rounded[:, :64] - 1).abs().max() < 1e-3
    assert rounded[:, 64:].isnan().all()


@pytest.mark.parametrize("name", ["llama with biases", "phi3", "gemma", "gemma2", "gemma3"])
def test_masks_of_an_adapter_have_the_logits_that_torch_gives_them(name: str, family: str) -> None:
    network, tokens, number_N = network_of(CONFIGS[name]), some_tokens(20), torch.arange(20)
    lora = some_adapter(Checkpoint(network, bundled_checkpoint().tokenizer, MASK_ID, None)).lora
    is_mask_N = number_N >= 16
    batch = replace(
        causal_batch(tokens, torch.zeros_like(tokens), number_N),
        offset_N=torch.where(is_mask_N, number_N - 16, -1),
        adapter_N=torch.where(is_mask_N, 0, -1),
    )
    logits = []
    for make in (partial(CPURunner, quantize=None, consume=False), TorchRunner):
        cache = SlotKVCache(network.config, network.dtype, network.device)
        cache.resize(2, 32)
        runner: Any = make(network, cache, mask_id=MASK_ID)
        base = runner.run(batch).logits_MV
        runner.use([runner.pack(lora)])
        logits.append(runner.run(batch).logits_MV)
        assert torch.equal(logits[-1][:16], base[:16]) and not torch.isclose(logits[-1][16:], base[16:]).all()
    torch.testing.assert_close(*logits, atol=1e-3, rtol=0)


def test_an_engine_that_consumes_its_network_frees_the_weights_it_packed() -> None:
    network, tokens = network_of(CONFIGS["llama, tied"]), some_tokens(20)
    expected = expected_logits(network, tokens)
    stand = Stand(network, consume=True)
    held = [name for name, parameter in network.named_parameters() if parameter.device.type != "meta"]
    assert all("norm" in name or "embed" in name for name in held)
    torch.testing.assert_close(stand.forward((0, 0, tokens)), expected, atol=2e-4, rtol=0)


def test_a_network_the_kernels_do_not_know_runs_through_torch_and_says_why() -> None:
    mixtral = network_of(MixtralConfig(**SIZES))
    engine = Engine(Checkpoint(mixtral, bundled_checkpoint().tokenizer, MASK_ID, None))
    assert engine.kernels.startswith("torch, because") and "not MixtralForCausalLM" in engine.kernels


def test_a_network_whose_sizes_do_not_fit_groups_is_not_quantised() -> None:
    with pytest.raises(KernelError, match="multiples of 64, not 96"):
        Stand(network_of(CONFIGS["sizes of 32 numbers"]), "int4")


def test_a_network_the_kernels_do_not_know_is_not_quantised() -> None:
    mixtral = network_of(MixtralConfig(**SIZES))
    checkpoint = Checkpoint(mixtral, bundled_checkpoint().tokenizer, MASK_ID, None)
    with pytest.raises(ModelError, match=r"quantize int8 needs kernels that do not run here: .*not MixtralForCausalLM"):
        Engine(checkpoint, EngineOptions(quantize="int8"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(**SIZES | {"hidden_size": 102}), "multiples of 32, not 102"),
        (LlamaConfig(**SIZES | {"head_dim": 48}), "heads of size 48"),
        (LlamaConfig(**SIZES | {"hidden_act": "gelu"}), "activation gelu"),
        (Phi3Config(**SIZES, pad_token_id=None, partial_rotary_factor=0.5), "rotate multiples of 32 .* not 16"),
        (LlamaConfig(**SIZES | {"num_key_value_heads": 4}), "multiple of the key heads, not 6 and 4"),
    ],
    ids=str,
)
def test_sizes_the_kernels_do_not_know_are_refused_by_name(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(KernelError, match=reason):
        Stand(network_of(config))


def test_rotations_grow_with_sequences_but_never_to_where_longrope_has_other_frequencies() -> None:
    size = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
    factors = {"short_factor": [1.0] * size, "long_factor": [4.0] * size}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 1500, **factors}
    lengths = {"max_position_embeddings": 6000, "original_max_position_embeddings": 1500}
    network = AutoModelForCausalLM.from_config(
        Phi3Config(**SIZES | lengths, pad_token_id=None, rope_parameters=longrope)
    )
    decoder = FusedDecoder(network, mask_id=MASK_ID, quantize=None, consume=False)
    before = decoder._rotations[0].clone()
    decoder._rotate_up_to(1200)
    assert decoder._rotations[0].shape[1] == 1500
    assert torch.equal(decoder._rotations[0][:, : before.shape[1]], before)
