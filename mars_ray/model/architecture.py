"""Read a config.json as the configuration of a decoder that transformers knows.

In:    the JSON object.
Out:   a configuration that names no code, no weight file and no kernel of its own.
Never: runs remote code. Entries that would ask for it are left out, and a model that cannot exist without them is
       refused.
"""

import re
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig, __version__
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from mars_ray.errors import ModelError, UnsafeModelError
from mars_ray.model.sizes import check_sizes

SAME_AS = {"a2d-qwen2": "qwen2"}
"""Model types that are a known network under another name. The MARS authors published plain Qwen2 as a2d-qwen2."""

_OF_THE_CLASS = frozenset({"architectures", "model_type"})
"""Left out at the top, where they belong to the class and are written again when saving."""
_PARTS = frozenset({"text_config", "decoder", "generator", "text_encoder"})
"""Where transformers looks for the sizes of the decoder; left out where the class has no such part."""
_NAMES_CODE = re.compile(
    r"auto_map|trust_remote_code"  # code in the folder
    r"|transformers_weights"  # another weight file than the one that was checked
    r"|\w*_implementation(_internal)?|use_(hub_)?kernels?|\w*kernel_config"  # a kernel to fetch from a hub
    r"|fusion_config|distributed_config|\w*quantization_config"  # rewrite layers
    r"|custom_pipelines?|custom_generate"  # code in the folder, too
)
"""Left out at any depth: a part of a configuration is one itself."""


def decoder_config(raw: dict[str, Any], folder: Path) -> PretrainedConfig:
    """Return the configuration in `raw`; `folder` is only named in errors."""
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
            "Give the model as it was before quantisation, whose name mostly lacks the last part (-AWQ, -GPTQ, "
            "-bnb-4bit), or its .gguf file."
        )
    known = CONFIG_MAPPING[model_type]
    check_sizes(raw, f"{folder}/config.json", known.attribute_map)
    try:
        left_out = _OF_THE_CLASS | (_PARTS - set(known.sub_configs))
        config = known.from_dict({name: value for name, value in _without_code(raw).items() if name not in left_out})
    # The values are a stranger's and each configuration class has its own ways to reject them.
    except Exception as error:
        raise ModelError(f"{folder}/config.json is not a valid {model_type} configuration: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{folder}: the model is an encoder-decoder, not a decoder. Give a causal language model.")
    return config


def _without_code(part: Any) -> Any:
    if isinstance(part, dict):
        return {name: _without_code(value) for name, value in part.items() if not _NAMES_CODE.fullmatch(name)}
    return [_without_code(value) for value in part] if isinstance(part, list) else part


def _is_decoder(model_type: str) -> bool:
    # transformers lets BERT and BART pose as causal models; what also has a masked or a
    # sequence-to-sequence form was not trained left to right.
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not (
        model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES or model_type in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    )
