"""Turn a .gguf file into a plain Hugging Face folder, once.

The weights are unpacked: a file of 32 or 16 bits keeps its dtype and its values, quantised weights become bfloat16,
whose rounding is finer than theirs. Tokenizer and chat template come along.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)

from mars_ray.errors import ModelError
from mars_ray.model.checkpoint import save_folder, share_weights
from mars_ray.model.folder import check_folder
from mars_ray.model.sources.cache import made_once
from mars_ray.progress import ProgressLine

MAGIC = b"GGUF"
_KEPT = {"F32": torch.float32, "F16": torch.float16}
"""Dtypes that a folder keeps, as GGUF names them."""


def converted(file: Path) -> Path:
    """Return the folder made from `file`, converting it if that was not done since the file last changed."""
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(MAGIC))
        state = file.stat()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}.") from error
    if magic != MAGIC:
        raise ModelError(f"{file} is no GGUF file. Give a folder, a .gguf file or a name on a hub.")
    of_file = f"{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    digest = hashlib.blake2b(of_file.encode(), digest_size=6).hexdigest()
    return made_once(f"{file.name.removesuffix('.gguf')}-{digest}", lambda folder: convert(file, folder))


def convert(file: Path, folder: Path) -> None:
    """Write the model in `file` to `folder`, which must be absent. Raises a `ModelError` where that cannot be done."""
    try:
        dtype = _dtype(file)
        with _shown(file):
            network, report = AutoModelForCausalLM.from_pretrained(
                str(file.parent),
                gguf_file=file.name,
                dtype=dtype,
                # Otherwise weights stay packed where a kernel can be fetched from a hub.
                quantization_config=GgufConfig(dequantize=True),
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    # A damaged or unknown file fails in as many ways as it has fields.
    except Exception as error:
        raise ModelError(
            f"{file} cannot be converted: {error}. Give the model as a folder of transformers or by its name on a hub."
        ) from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(f"{file} lacks {len(missing)} weights: {', '.join(missing[:3])}. Download the file again.")
    save_folder(folder, lambda partial: _write(network, tokenizer, partial))


@contextmanager
def _shown(file: Path) -> Iterator[None]:
    """Show progress as everything here does: the loader draws a bar of its own, without a terminal too."""
    bar = modeling_gguf_pytorch_utils.tqdm
    with ProgressLine(f"unpack {file.name}", total=None) as progress:

        def counted(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
            tensors = list(tensors)
            for done, tensor in enumerate(tensors):
                progress.update(done, {}, len(tensors))
                yield tensor
            progress.update(len(tensors), {}, len(tensors))

        modeling_gguf_pytorch_utils.tqdm = counted
        try:
            yield
        finally:
            modeling_gguf_pytorch_utils.tqdm = bar


def _write(network: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    network.config.__dict__.pop("quantization_config", None)
    network.hf_quantizer = None  # save_pretrained refuses what this one says was quantised
    network.save_pretrained(folder)
    share_weights(folder)
    for name in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
    check_folder(folder)


def _dtype(file: Path) -> torch.dtype:
    """Return the dtype of the matrices if it is one to keep; vectors are of 32 bits in most files."""
    from gguf import GGUFReader  # here, for it is slow to import and few need it

    kinds = {tensor.tensor_type.name for tensor in GGUFReader(file).tensors if len(tensor.shape) > 1}
    return _KEPT.get(kinds.pop(), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16
