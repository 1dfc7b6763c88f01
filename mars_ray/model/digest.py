"""A hash of all in a model folder that changes answers: weights, config, tokenizer, chat template.

The card does not count: a calibration does not change an answer.
"""

import hashlib
from pathlib import Path

PATTERNS = ("*.safetensors", "config.json", "generation_config.json", "token*", "vocab*", "merges*", "*.jinja")
DIGITS = 16


def folder_digest(folder: Path) -> str:
    """Return 16 hexadecimal digits; reads every byte of the weights, about a gigabyte in a second."""
    digest = hashlib.blake2b(digest_size=DIGITS // 2)
    for path in sorted({path for pattern in PATTERNS for path in folder.glob(pattern)}):
        with path.open("rb") as file:
            digest.update(path.name.encode() + b"\0" + hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()
