"""Convert a .gguf file in a child process with a memory limit.

    python -m mars_ray.model.sources.gguf_worker FILE FOLDER BYTES

In:    a file that is alone in its folder, the folder to write, and the memory limit.
Out:   the folder; standard output is empty, or contains the error.
Never: reads another file in the same folder, because transformers looks there for code to run.
"""

import re
import resource
import sys
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging

from mars_ray.errors import MarsRayError, ModelError
from mars_ray.model.architecture import check_sizes
from mars_ray.model.checkpoint import save_folder, share_weights
from mars_ray.model.folder import check_folder
from mars_ray.model.sources.gguf_file import GGUFFile, Unpacker
from mars_ray.progress import ProgressLine
from mars_ray.usable_cpus import usable_cpus

_KEPT = {"F32": torch.float32, "F16": torch.float16}
"""Dtypes that are kept, keyed by their names in GGUF."""
_SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "context_length": "max_position_embeddings",
    "expert_count": "num_experts",
}
"""Names of sizes in transformers, keyed by their names in GGUF without the prefix of the architecture."""


_OF_TURNS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endofturn|>")
_OF_TEXTS = ("<|endoftext|>", "<|end_of_text|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
END_TEXTS = frozenset(_OF_TURNS + _OF_TEXTS)
"""Control tokens that end a turn or a text, if a file does not say so itself; as in llama.cpp."""
GEMMA2_27B_LAYERS = 46
"""Number of layers of the only Gemma 2 that divides attention scores by something else than the size of its heads."""
ROPE_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
"""Tensors that scale the rotary embedding."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The scaling of Llama 3.1 to 3.3, of which a file holds only the factors that it leads to."""
LLAMA3_FACTORS = (8.0, 32.0)


def main(file: Path, folder: Path, memory_bytes: int) -> None:
    """Convert `file`, and print the reason if this fails."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    _limit_memory(memory_bytes)
    try:
        _convert(file, folder)
    except MarsRayError as error:
        print(error)
    except MemoryError:
        print(f"it takes more than {memory_bytes / 1e9:.1f} GB of memory, which is too much for a file of this size")
    # A damaged or unknown file can raise any error.
    except Exception as error:
        print(error or repr(error))


def _limit_memory(memory_bytes: int) -> None:
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux
        return
    taken = next(line for line in status.read_text().splitlines() if line.startswith("VmData"))
    limit = 1024 * int(taken.split()[1]) + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _convert(file: Path, folder: Path) -> None:
    content = GGUFFile(file)
    if (parts := content.value("split.count")) and parts > 1:
        raise ModelError(f"it is one of {parts} parts. Merge them first: llama-gguf-split --merge FIRST WHOLE.")
    dtype = _checked_dtype(content)
    rope = _rope_of(content)
    total = sum(tensor.data.nbytes for tensor in content.tensors)
    with ProgressLine(f"unpack {file.name}, MB", total=megabytes(total)) as progress:
        unpacked = 0

        def report(packed_bytes: int) -> None:
            nonlocal unpacked
            unpacked += packed_bytes
            progress.update(megabytes(unpacked), {})

        _speed_up_transformers(content, Unpacker(usable_cpus(), report))
        network, loading = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            dtype=dtype,
            # Otherwise weights would stay packed if a kernel could be fetched from a hub.
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    if loading["missing_keys"]:
        missing = sorted(loading["missing_keys"])
        raise ModelError(f"it lacks {len(missing)} weights: {', '.join(missing[:3])}.")
    _refuse_lost_weights(content, network)
    base = content.of_architecture("rope.freq_base")
    parameters = getattr(network.config, "rope_parameters", None) or {}
    if base is not None and "rope_theta" in parameters:
        rope = {"rope_theta": base, **rope}
    if rope:
        network.config.rope_parameters = parameters | rope
    if content.architecture == "gemma2" and network.config.num_hidden_layers == GEMMA2_27B_LAYERS:
        network.config.query_pre_attn_scalar = network.config.hidden_size // network.config.num_attention_heads
    if content.architecture == "phi3" and (window := content.of_architecture("attention.sliding_window")):
        network.config.sliding_window = window
    tokenizer = AutoTokenizer.from_pretrained(
        str(file.parent), gguf_file=file.name, local_files_only=True, trust_remote_code=False
    )
    ends = _end_ids(content, tokenizer)
    if len(ends) > 1:
        network.generation_config.eos_token_id = ends
    save_folder(folder, lambda partial: _write(network, tokenizer, partial))


def megabytes(size: int) -> int:
    """Return a size in bytes as megabytes, rounded up."""
    return -(-size // 1_000_000)


def _checked_dtype(content: GGUFFile) -> torch.dtype:
    """Return the common dtype of all matrices if it is in `_KEPT`, float32 for a mixture of those, otherwise bfloat16.
    Vectors are not considered, because they usually have 32 bits.

    Raises `ModelError` if sizes are out of bounds.
    """
    declared = {
        _SIZES[name]: field.contents()
        for key, field in content.fields.items()
        if (name := key.partition(".")[2]) in _SIZES
    }
    check_sizes(declared, "its sizes are out of bounds")
    kinds = {tensor.tensor_type.name for tensor in content.tensors if len(tensor.shape) > 1}
    if kinds == _KEPT.keys():
        return torch.float32  # holds both
    return _KEPT.get(kinds.pop(), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16


def _rope_of(content: GGUFFile) -> dict[str, Any]:
    """Return the scaling of the rotary embedding, which transformers reads of few architectures.

    Raises `ModelError` for a scaling that cannot be converted: the model would answer wrongly.
    """
    kind = content.of_architecture("rope.scaling.type")
    if kind not in (None, "none"):
        raise ModelError(f"its rotary embedding is scaled ({kind}), which cannot be converted.")
    for name in ("rope.scale_linear", "rope.scaling.factor"):  # files of 2023 name no kind
        if content.of_architecture(name) not in (None, 0.0, 1.0):
            raise ModelError(f"its rotary embedding is scaled ({name}), which cannot be converted.")
    heads, width = content.of_architecture("attention.head_count"), content.of_architecture("embedding_length")
    size = content.of_architecture("attention.key_length") or (width // heads if isinstance(heads, int) else None)
    rotated = content.of_architecture("rope.dimension_count")
    if content.architecture == "phi3" and rotated not in (None, size):
        raise ModelError(f"only {rotated} of {size} numbers of a head are rotated, which cannot be converted.")
    scaling = next((tensor for tensor in content.tensors if tensor.name.partition(".")[0] in ROPE_FACTORS), None)
    if scaling is None:
        return {}
    base = content.of_architecture("rope.freq_base") or 10000.0
    factors = np.asarray(scaling.data, dtype=np.float32).flatten()
    for factor in LLAMA3_FACTORS:
        if scaling.name == "rope_freqs.weight" and np.allclose(factors, _llama3(len(factors), base, factor), rtol=1e-3):
            return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    raise ModelError(f"its rotary embedding is scaled ({scaling.name}), which cannot be converted.")


def _llama3(count: int, base: float, factor: float) -> NDArray[np.float64]:
    """Return the factors by which Llama 3 divides the frequencies of its rotary embedding."""
    wavelengths = 2 * np.pi * base ** (np.arange(count) / count)
    low, high, context = LLAMA3.values()
    smooth = np.clip((context / wavelengths - low) / (high - low), 0, 1)
    factors: NDArray[np.float64] = 1 / ((1 - smooth) / factor + smooth)
    return factors


def _refuse_lost_weights(content: GGUFFile, network: PreTrainedModel) -> None:
    for kind, names in (("biases", r"\.bias$"), ("norms", r"norm|(^|\.)ln_")):
        in_file = sum(int(np.prod(tensor.shape)) for tensor in content.tensors if re.search(names, tensor.name))
        in_network = sum(values.numel() for name, values in network.named_parameters() if re.search(names, name))
        if in_file > in_network:
            raise ModelError(f"it has {kind} that {network.config.model_type} does not have, so they would be lost.")


def _end_ids(content: GGUFFile, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the tokens that end an answer or a turn."""
    ids = {content.value(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(ids | {special[text] for text in END_TEXTS & special.keys()})


def _speed_up_transformers(content: GGUFFile, unpacker: Unpacker) -> None:
    """Replace the functions of `gguf` with which transformers would take most of the time of a conversion.

    This process converts one file only. Transformers reads the header three times, and makes the table of tensor names
    once for each module.
    """
    gguf.GGUFReader = lambda _: content
    gguf.dequantize = unpacker.dequantize
    gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
    modeling_gguf_pytorch_utils.tqdm = lambda tensors, **_: tensors  # a progress bar


def _write(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    network.config.__dict__.pop("quantization_config", None)
    network.hf_quantizer = None  # save_pretrained would refuse a quantised network
    network.save_pretrained(folder)
    share_weights(folder)
    for name in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
    check_folder(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
