"""The OpenMP library of torch, whose settings differ from thread to thread."""

import ctypes
import sys
from pathlib import Path

import torch


def torch_openmp() -> ctypes.CDLL:
    """Return the OpenMP library that torch has loaded. Raises `OSError` if it cannot be found."""
    folder = Path(torch.__file__).parent
    if sys.platform == "darwin":
        return ctypes.CDLL(str(folder / "lib" / "libomp.dylib"))
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(maxsplit=5)[5] for line in lines if "libgomp" in line]
    # Other packages may have loaded copies of their own; torch's are in `torch` or `torch.libs`.
    own = [path for path in mapped if path.startswith(str(folder))]
    return ctypes.CDLL((own + mapped + ["libgomp.so.1"])[0])
