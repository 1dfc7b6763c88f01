"""The table of docs/train.md shows the arithmetic of `memory_samples`."""

import re
from pathlib import Path

import pytest

from tests.training.memory_samples import QWEN, sharded, whole

GUIDE = Path(__file__).parents[2] / "docs" / "train.md"
POSITIONS = 4096


@pytest.mark.parametrize("name", QWEN)
def test_the_guide_shows_the_memory_of_the_arithmetic(name: str) -> None:
    (cells,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", GUIDE.read_text(), re.MULTILINE)
    shape = QWEN[name]
    expected = [whole(shape, POSITIONS), *(sharded(shape, workers, POSITIONS) for workers in (2, 4, 8, 16))]
    assert [int(cell) for cell in cells.split(" | ")[:5]] == [round(size / 1e9) for size in expected]
