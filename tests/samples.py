"""The command line as a test calls it, and seeds of random tests."""

from collections.abc import Callable
from typing import Any

import pytest

Cli = Callable[..., tuple[int, str, str]]
"""The command line: words in; the exit code, standard output and standard error out."""


def seeds(count: int, quick: int) -> list[Any]:
    """Parameters 0, 1, ...: the first few for every run of the tests, all for `make test-slow` too."""
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= quick else []) for seed in range(count)]
