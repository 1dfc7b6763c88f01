"""Convert a .gguf file to a plain Hugging Face folder, once.

A file with 32 or 16 bits keeps its values, and its dtype if it has one. Quantised weights become bfloat16, which rounds
less than the quantisation did. Tokenizer and chat template are converted, too.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

from mars_ray.errors import ModelError
from mars_ray.model.sources.cache import CONVERSION, made_once

MAGIC = b"GGUF"
MEMORY_BYTES = 2 << 30
"""Memory limit of a conversion, to which `MEMORY_TIMES` times the file size is added."""
MEMORY_TIMES = 32
"""Multiple of the file size in the memory limit, because 2-bit values become 32 bits."""
OFFLINE = {"USE_HUB_KERNELS": "0", "HF_HUB_OFFLINE": "1"}
"""Variables with which transformers fetches no kernels from a hub for a file."""
SECONDS = 120
"""Time limit of a conversion, to which the time for reading the file at `BYTES_PER_S` is added."""
BYTES_PER_S = 1_000_000


def converted(file: Path) -> Path:
    """Return the converted folder of `file`; convert the file first if it is new or has changed."""
    try:
        with file.open("rb") as content:
            magic = content.read(len(MAGIC))
        state = file.stat()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error}.") from error
    if magic != MAGIC:
        raise ModelError(f"{file} is not a GGUF file. Give a folder, a .gguf file or a name on a hub.")
    version = f"{CONVERSION}\0{file.resolve()}\0{state.st_size}\0{state.st_mtime_ns}"
    digest = hashlib.blake2b(version.encode(), digest_size=6).hexdigest()
    return made_once(f"{file.name.removesuffix('.gguf')}-{digest}", lambda folder: convert(file, folder))


def convert(file: Path, folder: Path) -> None:
    """Write the model in `file` to `folder`, which must be absent. Raises `ModelError` if the conversion fails.

    A child process reads the file. It can be killed, sees no other file in the folder, and has no standard input on
    which it could be permitted to run code.
    """
    size = file.stat().st_size
    memory = min(MEMORY_BYTES + MEMORY_TIMES * size, psutil.virtual_memory().total)
    seconds = SECONDS + size / BYTES_PER_S
    with TemporaryDirectory() as scratch:
        link = Path(scratch) / file.name
        link.symlink_to(file.resolve())
        arguments = (str(link), str(folder.absolute()), str(memory))
        command = [sys.executable, "-P", "-m", "mars_ray.model.sources.gguf_worker", *arguments]
        try:
            process = subprocess.run(
                command,
                env=os.environ | OFFLINE,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                timeout=seconds,
                check=False,
            )
            failure = f"its reader ended with code {process.returncode}" if process.returncode else ""
            reason = process.stdout.strip() or failure
        except subprocess.TimeoutExpired:
            reason = f"it took more than {seconds:.0f} s"
    if reason:
        raise ModelError(
            f"{file} cannot be converted: {reason.rstrip('.')}. Download the file again, or give the model as a folder "
            "of transformers or by its name on a hub."
        )
