"""The decoders that the kernels support, and the parts in which they differ.

`decoder.cpp` implements one layer: norms, attention with rotary embeddings, and a gated MLP. The entries of
`ARCHITECTURES` name the parts of a network in which transformers keeps what that layer needs.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    GemmaForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from mars_ray.engine.kernels.families import KernelError
from mars_ray.engine.kv.cache import kv_shape

HEAD_SIZES = (32, 64, 96, 128, 256)
SEPARATE = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
FUSED = (("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",))


class Activation(IntEnum):
    """The enum `Activation` of `activation.h`, by the names of transformers."""

    silu = 0
    gelu_pytorch_tanh = 1


class NormRounding(IntEnum):
    """The enum `NormRounding` of `rms_norm.h`."""

    BEFORE_WEIGHT = 0
    AFTER_WEIGHT = 1


@dataclass(frozen=True, slots=True)
class Architecture:
    """The parts of a decoder and of its configuration, by their names in transformers."""

    linears: tuple[tuple[str, ...], ...] = SEPARATE
    """Linear layers of a decoder layer; each group is packed as one matrix."""
    mlp_norm: str = "post_attention_layernorm"
    output_norm: str | None = None
    """Norm of the attention's output, before it is added to the residual stream."""
    down_norm: str | None = None
    """Norm of the MLP's output, before it is added to the residual stream."""
    rounding: NormRounding = NormRounding.BEFORE_WEIGHT
    norm_offset: float = 0.0
    """Number that is added to the weights of norms."""
    activation: str = "hidden_act"
    attention_cap: str | None = None
    logit_cap: str | None = None
    one_window: bool = False
    """Whether all layers share the sliding window of the configuration. Otherwise each layer has its own or none."""
    rotary_by_layer_type: bool = False
    """Whether layers with a sliding window have a rotary embedding of their own."""

    def norm_weight(self, norm: Any) -> Tensor:
        """Return the float32 numbers [H] by which the kernels multiply."""
        weight: Tensor = norm.weight.detach().float() + self.norm_offset
        return weight.contiguous()

    def activation_of(self, config: Any) -> str:
        """Return the name of the MLP's activation function, such as "silu"."""
        return cast(str, getattr(config, self.activation))

    def caps_of(self, config: Any) -> tuple[float, float]:
        """Return the soft caps of attention scores and of logits; 0 means none."""
        names = (self.attention_cap, self.logit_cap)
        attention, logits = (float(getattr(config, name) or 0) if name else 0.0 for name in names)
        return attention, logits

    def window_of(self, attention: Any) -> int:
        """Return the sliding window of a layer; 0 means none."""
        holder = attention.config if self.one_window else attention
        return getattr(holder, "sliding_window", None) or 0

    def rotary_of(self, attention: Any) -> int:
        """Return the index of the rotary embedding of a layer among those of `rotations`."""
        return _layer_types(attention.config).index(attention.layer_type) if self.rotary_by_layer_type else 0

    def rotations(self, body: Any, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 cosines and sines [E, N, rotary_dim] of the E rotary embeddings of a network.

        They are rounded to the dtype of the network.
        """
        like = torch.empty(0, dtype=body.dtype)
        if not self.rotary_by_layer_type:
            cosine_1ND, sine_1ND = body.rotary_emb(like, position_N[None])
            return cosine_1ND.float().contiguous(), sine_1ND.float().contiguous()
        pairs = [body.rotary_emb(like, position_N[None], kind) for kind in _layer_types(body.config)]
        cosines, sines = (torch.cat(parts).float().contiguous() for parts in zip(*pairs, strict=True))
        return cosines, sines

    def rotary_dim(self, body: Any) -> int:
        """Return the number of leading numbers of a head that are rotated."""
        return self.rotations(body, torch.zeros(1, dtype=torch.int64))[0].shape[-1]


LLAMA = Architecture()
MISTRAL = Architecture(one_window=True)
PHI3 = Architecture(linears=FUSED, one_window=True)
GEMMA = Architecture(rounding=NormRounding.AFTER_WEIGHT, norm_offset=1.0)
GEMMA2 = replace(
    GEMMA,
    mlp_norm="pre_feedforward_layernorm",
    output_norm="post_attention_layernorm",
    down_norm="post_feedforward_layernorm",
    activation="hidden_activation",
    attention_cap="attn_logit_softcapping",
    logit_cap="final_logit_softcapping",
)
GEMMA3 = replace(GEMMA2, attention_cap=None, rotary_by_layer_type=True)
ARCHITECTURES: dict[type[PreTrainedModel], Architecture] = {
    LlamaForCausalLM: LLAMA,
    MistralForCausalLM: MISTRAL,
    Qwen2ForCausalLM: LLAMA,
    Qwen3ForCausalLM: LLAMA,
    Phi3ForCausalLM: PHI3,
    GemmaForCausalLM: GEMMA,
    Gemma2ForCausalLM: GEMMA2,
    Gemma3ForCausalLM: GEMMA3,
}
"""Networks whose layers `decoder.cpp` implements. Subclasses are excluded, because their layers may differ."""


def architecture_of(network: PreTrainedModel) -> Architecture:
    """Return the architecture of a network. Raises `KernelError` for a network that the kernels do not support."""
    architecture = ARCHITECTURES.get(type(network))
    if architecture is None:
        names = ", ".join(kind.__name__ for kind in ARCHITECTURES)
        raise KernelError(f"the kernels support {names}, not {type(network).__name__}.")
    if network.device.type != "cpu" or network.dtype not in (torch.float32, torch.bfloat16):
        raise KernelError(
            f"the kernels support float32 and bfloat16 on a CPU, not {network.dtype} on {network.device}."
        )
    _check_sizes(network, architecture)
    return architecture


def odd_sizes(network: PreTrainedModel, multiple: int) -> list[int]:
    """Return the numbers of inputs of linear layers that are no multiples of `multiple`."""
    config = network.config
    attention = config.num_attention_heads * cast(Any, network.model).layers[0].self_attn.head_dim
    return [size for size in (config.hidden_size, config.intermediate_size, attention) if size % multiple]


def _layer_types(config: Any) -> list[str]:
    return sorted(set(config.layer_types))


def _check_sizes(network: PreTrainedModel, architecture: Architecture) -> None:
    config = network.config
    body = cast(Any, network.model)
    head_dim = body.layers[0].self_attn.head_dim
    activation = architecture.activation_of(config)
    if activation not in Activation.__members__ or head_dim not in HEAD_SIZES:
        raise KernelError(f"the kernels do not support activation {activation} with heads of size {head_dim}.")
    if kv_shape(config) != (len(body.layers), config.num_key_value_heads, head_dim):
        raise KernelError(
            f"layers, key heads and head size in the config are {kv_shape(config)}, but the network has others."
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise KernelError(
            f"the number of query heads must be a multiple of the key heads, not {config.num_attention_heads} and "
            f"{config.num_key_value_heads}."
        )
    if (rotary_dim := architecture.rotary_dim(body)) % 32:
        raise KernelError(f"the kernels rotate multiples of 32 numbers of a head, not {rotary_dim}.")
    if odd := odd_sizes(network, 32):
        raise KernelError(f"the kernels need sizes that are multiples of 32, not {odd[0]}.")
