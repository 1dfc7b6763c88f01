"""A tiny llama and its tokenizer as a .gguf file, written as llama.cpp's converter writes them."""

import json
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from mars_ray.model.sources import gguf_worker
from mars_ray.model.sources.gguf import MEMORY_BYTES
from tests.factories.forks import in_fork
from tests.factories.networks import tiny_network
from tests.factories.tokenizers import SPECIAL_TOKENS, tiny_tokenizer_json

LAYERS, HEADS, KEY_HEADS, WIDTH, INNER, CONTEXT = 2, 4, 2, 32, 64, 64
CHAT_TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_llama(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A network whose values `dtype` can hold, in float32."""
    network = tiny_network(
        "llama",
        vocab_size=len(json.loads(tiny_tokenizer_json())["model"]["vocab"]),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        initializer_range=0.3,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return network


def write_gguf(
    network: PreTrainedModel, file: Path, kind: str, more: Callable[[gguf.GGUFWriter], object] = lambda _: None
) -> None:
    """Write the matrices as `kind` ("F32", "F16", "Q8_0"), the vectors as F32, and what `more` adds."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(network.config.vocab_size)
    _add_tokenizer(writer)
    for name, tensor in network.state_dict().items():
        values = tensor.numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = _interleaved(values, HEADS if "q_proj" in name else KEY_HEADS)
        quantised = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        packed = gguf.quants.quantize(np.ascontiguousarray(values), quantised)
        writer.add_tensor(_gguf_name(name), packed, raw_dtype=quantised)
    more(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def convert_in_fork(file: Path, folder: Path) -> str:
    """Convert as the child process of `convert` does; return what it printed, which is the reason of a failure."""
    return in_fork(_printed, file, folder)


def _printed(file: Path, folder: Path) -> str:
    with redirect_stdout(StringIO()) as said:
        gguf_worker.main(file, folder, MEMORY_BYTES)
    return said.getvalue()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    model = json.loads(tiny_tokenizer_json())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in top:
        return f"{top[stem]}.weight"
    layer, rest = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def _interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring rows of a head where transformers rotates its two halves."""
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)
