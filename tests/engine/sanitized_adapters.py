"""Decode with adapters through kernels that watch every access: right ones run clean, wrong ones are refused.

A program of its own, since the sanitizer must be in the process before Python is; see `test_sanitized`.
"""

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)

from mars_ray.adapter.folder import Adapter
from mars_ray.adapter.gated_lora import GatedLoRA, LoraShape, linears_of
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.kernels import library_file
from mars_ray.engine.kernels.packed import GROUP
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams
from mars_ray.errors import AdapterError
from mars_ray.model.checkpoint import Checkpoint
from tests.engine.engine_parts import bundled_tokenizer
from tests.factories.cards import adapter_card
from tests.factories.engine import request, run

WATCHED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CONFIGS: list[type[PretrainedConfig]] = [LlamaConfig, Qwen3Config, Phi3Config, Gemma2Config, Gemma3TextConfig]
FORMATS = [
    (torch.float32, None),
    (torch.float32, "int8"),
    (torch.bfloat16, None),
    (torch.bfloat16, "int8"),
    (torch.bfloat16, "int4"),
]
TIMES_32 = st.integers(1, 5).map(lambda count: 32 * count)
settings.register_profile(
    "sanitized", deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("sanitized")


@st.composite
def bases(draw: st.DrawFn, quantize: str | None) -> Any:
    multiple = GROUP if quantize else 32
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 2))
    config = draw(st.sampled_from(CONFIGS))
    return AutoModelForCausalLM.from_config(
        config(
            hidden_size=multiple * heads * draw(st.integers(1, 2)),
            intermediate_size=multiple * draw(st.integers(1, 5)),
            num_hidden_layers=draw(st.integers(1, 2)),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=draw(st.sampled_from([size for size in (32, 64, 96) if size * heads % multiple == 0])),
            vocab_size=draw(st.integers(40, 130)),
            max_position_embeddings=64,
            tie_word_embeddings=draw(st.booleans()),
            pad_token_id=None,
        )
    ).eval()


def adapter_of(hidden: int, linears: dict[str, tuple[int, int]], rank: int, masks: int) -> Adapter:
    lora = GatedLoRA(LoraShape(rank=rank, alpha=4.0, masks=masks, linears=linears), hidden)
    for parameter in lora.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return Adapter(lora.requires_grad_(False).eval(), adapter_card(block=6))


def decode(network: Any, adapters: dict[str | None, Adapter], quantize: Any) -> None:
    mask_id = network.config.vocab_size - 1
    engine = Engine(
        Checkpoint(network, bundled_tokenizer(), mask_id, None),
        EngineOptions(max_num_seqs=3, quantize=quantize),
        adapters=adapters,
    )
    assert engine.kernels.startswith("CPU kernels")
    modes = [DecodeParams(mode=Mode.EXACT, adapter=name) for name in adapters]
    modes += [DecodeParams(mode=Mode.THRESHOLD, threshold=0.0), DecodeParams(mode=Mode.AR)]
    asked = [request(n, range(1, 3 + 5 * n), decode, max_tokens=7) for n, decode in enumerate(modes)]
    assert len(run(engine, asked)) == len(asked)


@settings(max_examples=60)
@given(st.data())
def right_adapters_run_clean(data: st.DataObject) -> None:
    dtype, quantize = data.draw(st.sampled_from(FORMATS))
    network = data.draw(bases(quantize))
    every = linears_of(network, None)
    adapters: dict[str | None, Adapter] = {}
    for name in (None, "other"):
        names = data.draw(st.sets(st.sampled_from(sorted(every)), min_size=1))
        rank, masks = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 8))
        adapters[name] = adapter_of(network.config.hidden_size, {each: every[each] for each in names}, rank, masks)
    decode(network.to(dtype), adapters, quantize)


@settings(max_examples=60)
@given(st.data())
def wrong_adapters_are_refused(data: st.DataObject) -> None:
    dtype, quantize = data.draw(st.sampled_from(FORMATS))
    network = data.draw(bases(quantize))
    every = linears_of(network, None)
    hidden = network.config.hidden_size
    name = data.draw(st.sampled_from(sorted(every)))
    other = st.integers(1, 9).map(lambda count: 32 * count)
    sizes = data.draw(st.tuples(other, other).filter(lambda sizes: sizes != every[name]))
    wrong = data.draw(
        st.sampled_from([
            adapter_of(hidden + data.draw(TIMES_32), {name: every[name]}, 8, 4),
            adapter_of(hidden, {name: sizes}, 8, 4),
            adapter_of(hidden, {name: every[name], f"model.layers.7.{name}": sizes}, 8, 4),
        ])
    )  # fmt: skip
    try:
        decode(network.to(dtype), {None: wrong}, quantize)
    except AdapterError:
        return
    raise AssertionError(f"{wrong.lora.shape} was put to {every}")


if __name__ == "__main__":
    library_file.FLAGS = (*library_file.FLAGS, *WATCHED)
    right_adapters_run_clean()
    wrong_adapters_are_refused()
    print("clean")
