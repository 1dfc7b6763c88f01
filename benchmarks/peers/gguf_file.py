"""Write a model as a .gguf file, for engines that take token ids.

Matrices have 16 bits (F16), vectors 32. Supported are Llama and Qwen2 with plain rotary positions, for which llama.cpp
has the same arithmetic. The file contains the tokenizer's vocabulary, because some engines need one, but not its rules
to split text, so it is not for text.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig

from benchmarks.peers.peer import PeerUnavailableError
from mars_ray.model.folder import TOKENIZER_FILE, check_folder
from mars_ray.model.json_object import read_json_object
from mars_ray.model.network import load_network

ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
SUFFIXES = (".weight", ".bias")


def write_gguf(folder: Path, file: Path) -> None:
    """Write the model in `folder` to `file`. Raises a `PeerUnavailableError` for other architectures."""
    model_folder = check_folder(folder)
    config = model_folder.config
    _check(config)
    network = load_network(model_folder, torch.float32, "sdpa")
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    writer = gguf.GGUFWriter(file, config.model_type)
    _add_sizes(writer, config)
    _add_tokenizer(writer, folder, config)
    tied = network.get_output_embeddings().weight is network.get_input_embeddings().weight
    for name, tensor in network.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        values = tensor.numpy()
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = _interleaved(values, heads)
        writer.add_tensor(names.get_name(name, SUFFIXES), values.astype(np.float16) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _check(config: PretrainedConfig) -> None:
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise PeerUnavailableError(f"of {config.model_type} no .gguf file can be made here, only of {known}")
    if config.rope_parameters["rope_type"] != "default":
        raise PeerUnavailableError(f"cannot write a .gguf file with rope {config.rope_parameters['rope_type']!r}")
    if getattr(config, "use_sliding_window", False) or getattr(config, "attention_bias", False):
        raise PeerUnavailableError("cannot write a .gguf file with a sliding window, or with attention biases")


def _add_sizes(writer: gguf.GGUFWriter, config: PretrainedConfig) -> None:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: PretrainedConfig) -> None:
    """Add the tokens of a tokenizer.json with merges; leave out any other tokenizer."""
    rows: int = config.vocab_size
    stored = read_json_object(folder / TOKENIZER_FILE) if (folder / TOKENIZER_FILE).is_file() else {}
    model: dict[str, Any] = stored.get("model") or {}
    if model.get("type") != "BPE":
        writer.add_tokenizer_model("none")
        return
    added: list[dict[str, Any]] = stored.get("added_tokens") or []
    special = {token["id"]: token["content"] for token in added}
    names = {number: name for name, number in model["vocab"].items()} | special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([names.get(number, f"<unused {number}>") for number in range(rows)])
    writer.add_token_types(
        [gguf.TokenType.CONTROL if number in special else gguf.TokenType.NORMAL for number in range(rows)]
    )
    stops = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    writer.add_eos_token_id(stops[0] or 0)
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])


def _interleaved(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of each head: llama.cpp rotates neighbouring rows, transformers the two halves."""
    rows, columns = values.shape
    halves = values.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
