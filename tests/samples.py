"""The command line as a test calls it, seeds of random tests, the memory of a process, and values of any type."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

Cli = Callable[..., tuple[int, str, str]]
"""The command line: words in; the exit code, standard output and standard error out."""


def seeds(count: int, quick: int) -> list[Any]:
    """Parameters 0, 1, ...: the first few for every run of the tests, all for `make test-slow` too."""
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= quick else []) for seed in range(count)]


def memory_mib(pid: int | str = "self") -> float:
    """Return the memory of a process, without the files that it has mapped."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("RssAnon:")[2].split()[0]) / 1024


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.characters(categories=["Cs"])
    | st.binary()
    | st.builds(object)
    | st.sampled_from([int, Path("a"), np.float32(0.5), np.array(3), np.array([1, 2]), range(3), 1j, {1, 2}]),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.text() | st.integers(), children, max_size=2)
        | st.tuples(children)
    ),
    max_leaves=5,
)
"""Values that an option or an argument may get by mistake."""
