"""A plug-in of vLLM that gives Triton's interpreter the function with which vLLM 0.29 draws tokens."""

import triton.language as tl
from triton.language.extra import libdevice


def register() -> None:
    """Set the function, which the interpreter lacks."""
    libdevice.log1p = lambda x: tl.log(1 + x)
