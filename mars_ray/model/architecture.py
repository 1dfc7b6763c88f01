"""Turn a config.json into the configuration of a decoder that transformers supports.

In:    the JSON object.
Out:   a configuration without names of code, weight files or kernels, and without a dtype.
Never: runs remote code. Entries that request it are left out, and a model that needs them is refused.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig, __version__
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from mars_ray.errors import ModelError, UnsafeModelError

SAME_AS = {"a2d-qwen2": "qwen2"}
"""Aliases of known model types. The MARS authors published plain Qwen2 as a2d-qwen2."""

LARGEST = {
    "num_hidden_layers": 1 << 10,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 28,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "n_routed_experts": 1 << 12,
}
"""Upper bounds of declared sizes, about ten times the sizes of the largest models, by their names in transformers.
Without them, a large number in a file could lead to a network that takes up all memory."""
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Types of layers whose only memory of earlier positions is a KV cache, in which every position has a place."""
_OF_THE_CLASS = frozenset({"architectures", "model_type"})
"""Top-level entries to leave out; the configuration class sets them itself."""
_PARTS = frozenset({"text_config", "decoder", "generator", "text_encoder"})
"""Parts in which transformers looks for the sizes of the decoder. A part is omitted from the configuration if the class
does not have it."""
_LEFT_OUT = re.compile(
    r"auto_map|trust_remote_code"  # code in the folder
    r"|transformers_weights"  # a weight file other than the checked one
    r"|\w*_implementation(_internal)?|use_(hub_)?kernels?|\w*kernel_config"  # a kernel to fetch from a hub
    r"|fusion_config|distributed_config|\w*quantization_config"  # rewrite layers
    r"|custom_pipelines?|custom_generate"  # code in the folder
    r"|(torch_)?dtype"  # `ResolvedModel.dtype` decides; processes without torch could not unpickle a dtype of torch
)
"""Entries to leave out at any depth, because parts of a configuration are configurations, too."""


def decoder_config(raw: dict[str, Any], folder: Path) -> PretrainedConfig:
    """Return the configuration in `raw`. Raises `ModelError` if it is invalid; the message names `folder`."""
    declared = raw.get("model_type")
    if not isinstance(declared, str) or not declared:
        raise ModelError(f"{folder}/config.json names no model_type. Give a folder saved by transformers.")
    model_type = SAME_AS.get(declared, declared)
    if model_type not in CONFIG_MAPPING:
        if "auto_map" in raw:
            raise UnsafeModelError(
                f"{folder}: model type {declared!r} needs the code that came with it (auto_map in config.json), "
                "and such code is never run. Give a model of a type that transformers has built in."
            )
        raise ModelError(f"{folder}: model type {declared!r} is not known to transformers {__version__}.")
    if not _is_decoder(model_type):
        raise ModelError(f"{folder}: model type {declared!r} is not a decoder. Give a causal language model.")
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ModelError(
            f"{folder}: the weights are quantised{f' with {method}' if method else ''}, which needs special kernels. "
            "Give the unquantised model, whose name usually lacks the last part (-AWQ, -GPTQ, -bnb-4bit), or its "
            ".gguf file."
        )
    config_class = CONFIG_MAPPING[model_type]
    check_sizes(raw, f"{folder}/config.json", config_class.attribute_map)
    try:
        left_out = _OF_THE_CLASS | (_PARTS - set(config_class.sub_configs))
        kept = {name: value for name, value in _without_code(raw).items() if name not in left_out}
        config = config_class.from_dict(kept)
    # The values are untrusted, and each configuration class raises different errors.
    except Exception as error:
        raise ModelError(f"{folder}/config.json is not a valid {model_type} configuration: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{folder}: the model is an encoder-decoder, not a decoder. Give a causal language model.")
    for name in ("max_position_embeddings", "num_attention_heads"):
        if not isinstance(getattr(config.get_text_config(), name, None), int):
            raise ModelError(
                f"{folder}: model type {declared!r} has no {name}; only decoders with attention and rotary or learned "
                "positions are supported."
            )
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if others := sorted(kinds - ATTENTION_LAYERS):
        raise ModelError(
            f"{folder}: model type {declared!r} has layers of the type {others[0]}; only full and sliding attention "
            "are supported. Choose another model."
        )
    return config


def _without_code(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _without_code(value) for name, value in part.items() if not _LEFT_OUT.fullmatch(name)}
    return [_without_code(value) for value in part] if isinstance(part, list) else part


def _is_decoder(model_type: str) -> bool:
    # transformers lists BERT and BART as causal models. A type that also has a masked or a
    # sequence-to-sequence form was not trained left to right.
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not (
        model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES or model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    )


def check_sizes(declared: Mapping[str, Any], source: str, names: Mapping[str, str] | None = None) -> None:
    """Raise `ModelError` if a size in `declared` is out of bounds, at any depth; the message names `source`.

    `names` maps the names of sizes in transformers to their names in `declared`, if they differ.
    """
    bounds = LARGEST | {own: LARGEST[name] for name, own in (names or {}).items() if name in LARGEST}
    pending: list[Any] = [declared]
    while pending:
        match pending.pop():
            case dict() as part:
                for name, value in part.items():
                    if name in bounds:
                        _check_size(source, name, value, bounds[name])
                pending += part.values()
            case list() as parts:
                pending += parts


def _check_size(source: str, name: str, value: Any, largest: int) -> None:
    for size in value if isinstance(value, list) else [value]:
        if isinstance(size, int | float) and not 0 <= size <= largest:
            raise ModelError(f"{source}: {name} is {size}; it must be 0 to {largest}.")
