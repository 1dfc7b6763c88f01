"""The C library's memory, kept between the steps of a training run.

Each step frees all its activations, and glibc gives large blocks back to the system at once, which has to clear every
page of them again a moment later: a third of a step of 135 million parameters. What a run holds is its peak either way.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # malloc.h
GROWTH_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """Let this process keep what it frees until it ends; nothing happens where the C library is not glibc."""
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, -1)
        library.mallopt(_TOP_PAD, GROWTH_BYTES)
