"""Compute digests of a model folder: of all files that affect answers, of the weights, or of the vocabulary.

The card is not included, because a calibration affects no answer.
"""

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from mars_ray.errors import ModelError

WEIGHTS = "*.safetensors"
TOKENS = ("token*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges*")
PATTERNS = (WEIGHTS, "config.json", "generation_config.json", *TOKENS, "*.jinja")
DIGITS = 16


def folder_digest(folder: Path) -> str:
    """Return the 16-digit digest of weights, config, tokenizer and chat template; about a gigabyte is read per
    second."""
    return _digest(folder, PATTERNS)


def weights_digest(folder: Path) -> str:
    """Return the 16-digit digest of the weights, which does not depend on library versions in the config."""
    return _digest(folder, (WEIGHTS,))


def vocabulary_digest(folder: Path) -> str:
    """Return the 16-digit digest of the tokens that merges make, with their numbers.

    It is the same for a model, its quantisations and its fine-tunes: special tokens and padding, in which their files
    differ, are not made by merges. Without merges, all files of the tokenizer count.
    """
    for path in _files(folder, ("tokenizer.json",)):
        status = path.stat()
        if merged := _merges_digest(path.absolute(), status.st_size, status.st_mtime_ns, status.st_ctime_ns):
            return merged
    return _digest(folder, ("tokenizer.*", "vocab*"))


def folder_state(folder: Path) -> str:
    """Return a 16-digit digest of the sizes and times of the files of `folder_digest`, without reading them.

    A changed file has another state. The change time is included, because `cp -p` keeps the modification time.
    """
    digest = hashlib.blake2b(digest_size=DIGITS // 2)
    for path in _files(folder, PATTERNS):
        status = path.stat()
        digest.update(f"{path.name}\0{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode())
    return digest.hexdigest()


def _digest(folder: Path, patterns: tuple[str, ...]) -> str:
    digest = hashlib.blake2b(digest_size=DIGITS // 2)
    for path in _files(folder, patterns):
        status = path.stat()
        digest.update(path.name.encode() + b"\0")
        digest.update(_file_digest(path.absolute(), status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return digest.hexdigest()


@lru_cache(maxsize=1024)
def _file_digest(path: Path, *_state: int) -> bytes:
    """Return the digest of a file, which is read again only if its size or times have changed."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").digest()


@lru_cache(maxsize=1024)
def _merges_digest(tokenizer: Path, *_state: int) -> str | None:
    """Return the digest of the tokens that merges make, or None without merges. A file is read again only if its size
    or times have changed."""
    digest = hashlib.blake2b(digest_size=DIGITS // 2)
    try:
        model = json.loads(tokenizer.read_bytes())["model"]
        if not model.get("merges"):
            return None
        pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
        for token in map("".join, pairs):
            digest.update(f"{model['vocab'].get(token)} {token}\0".encode())
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{tokenizer} is damaged ({error!r}). Download the model again.") from error
    return digest.hexdigest()


def _files(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    return sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
