"""Packed sequences in one file of at most 8 MB, to carry to a machine with a GPU.

    mars-ray prepare --input train.jsonl --model smollm2 --output packed/
    python -m benchmarks.gpu.packed_file packed/ --model smollm2 --output train.npz

The file holds as many of the first sequences of the folder as fit. Reading it needs numpy and torch only.
"""

import argparse
import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mars_ray.errors import DataError
from mars_ray.method.streams import PackedRows
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program

MAX_BYTES = 8_000_000
FIELDS = ("tokens", "response", "example")


@dataclass(frozen=True, slots=True)
class PackedFile:
    """The packed sequences of a file, as tensors [sequences, length]."""

    tokens: torch.Tensor
    response: torch.Tensor
    example: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self, numbers: list[int]) -> PackedRows:
        """Return the sequences with these numbers."""
        tokens, response, example = (field[numbers] for field in (self.tokens, self.response, self.example))
        return PackedRows.of(tokens.long(), response, example.long())


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of the tokens and their ids, which a model shares with its fine-tunes."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


def pack_file(rows: PackedRows, digest: str) -> bytes:
    """Return the content of a file with all rows, or with as many of the first rows as fit."""
    count = len(rows.tokens_RT)
    while True:
        content = io.BytesIO()
        np.savez_compressed(
            content,
            vocabulary=np.frombuffer(bytes.fromhex(digest), np.uint8),
            tokens=rows.tokens_RT[:count].numpy().astype(np.int32),
            response=rows.response_RT[:count].numpy(),
            example=rows.example_RT[:count].numpy().astype(np.int16),
        )
        if content.tell() <= MAX_BYTES:
            return content.getvalue()
        count = int(count * 0.98 * MAX_BYTES / content.tell())


def read_packed_file(file: Path, tokenizer: PreTrainedTokenizerBase) -> PackedFile:
    """Read a file. Raises `DataError` if it is missing or damaged, or was packed with another vocabulary."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            digest = arrays["vocabulary"].tobytes().hex()
            tensors = [torch.from_numpy(arrays[name]) for name in FIELDS]
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise DataError(f"{file} cannot be read ({error}); make it with benchmarks.gpu.packed_file.") from error
    if digest != vocabulary_digest(tokenizer):
        raise DataError(f"{file} was packed with the tokens of another model; pack it again with --model.")
    return PackedFile(*tensors)


def main() -> None:
    """Write the file."""
    from mars_ray.data.packed import PackedData  # needs pyarrow, which the machine with the GPU may lack

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output of mars-ray prepare")
    parser.add_argument("--model", required=True, help="the model that the folder was prepared for")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    data = PackedData(arguments.folder)
    folder = resolve_model(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    content = pack_file(data.rows(range(len(data))), vocabulary_digest(tokenizer))
    arguments.output.write_bytes(content)
    carried = read_packed_file(arguments.output, tokenizer)
    print(f"{arguments.output}: {len(carried):,} of {len(data):,} packed sequences, {len(content) / 1e6:.1f} MB")


if __name__ == "__main__":
    run_program("benchmarks.gpu.packed_file", main)
