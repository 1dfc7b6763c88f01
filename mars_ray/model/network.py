"""Load the network of a resolved model, with every weight read from the model's files.

In:    a ResolvedModel, a dtype and an attention implementation.
Out:   the network on the CPU, in eval mode.
Never: keeps random weights: a missing weight is an error, whereas transformers only warns about it.
"""

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from mars_ray.errors import ModelError
from mars_ray.model.folder import ResolvedModel

SPARE_NUMBERS = 1 << 26
"""Loading is attempted even if this many weights are missing, because the error after loading can name them."""


def attention_for(config: PretrainedConfig) -> str | None:
    """Return the attention implementation of transformers that computes all that a decoder asks for.

    None lets transformers choose. SDPA has no soft cap, but older versions of transformers choose it in spite of one.
    """
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def empty_network(config: PretrainedConfig) -> PreTrainedModel:
    """Return the causal language model of `config` without memory for its weights. Each layer raises different errors
    for wrong sizes."""
    with torch.device("meta"):
        network: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    return network


def load_network(model: ResolvedModel, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """Return the causal language model of `model`, with its `attention_for` unless another one is given.

    Raises `ModelError` if the weights cannot be loaded.
    """
    network_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    try:
        _check_memory(model)
        network, report = network_class.from_pretrained(
            str(model.folder),
            config=model.config,
            dtype=dtype,
            attn_implementation=attention or attention_for(model.config),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except ModelError:
        raise
    # The sizes are untrusted, and each layer raises different errors for wrong sizes.
    except Exception as error:
        raise ModelError(
            f"{model.folder}: the weights cannot be loaded as {model.config.model_type}: {error}"
        ) from error
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"{model.folder} lacks {len(missing)} weights that config.json requires: {', '.join(missing[:3])}. "
            "Download or save the model again."
        )
    _mark_untied_in_config(network)
    return network.eval()


def _check_memory(model: ResolvedModel) -> None:
    """Raise `ModelError` if the network is far larger than its files; transformers would allocate all of it before
    failing."""
    network = empty_network(model.config)
    network.tie_weights()
    needed = sum(parameter.numel() for parameter in network.parameters())
    held = model.parameters.total()
    if needed > 2 * held + SPARE_NUMBERS:
        raise ModelError(
            f"{model.folder}: config.json requires {needed:,} weights, but the files hold {held:,}. Download "
            "or save the model again."
        )


def _mark_untied_in_config(network: PreTrainedModel) -> None:
    # Files with two different tables load untied even if the config says "tied", but the next resize would
    # follow the config and overwrite the output table.
    head = network.get_output_embeddings()
    if head is not None and head.weight is not network.get_input_embeddings().weight:
        network.config.tie_word_embeddings = False
