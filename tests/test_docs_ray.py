"""What the guides show of programs on Ray works as it stands, on a cluster."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from tests.test_docs import fenced, uses_ray

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


def ray_blocks() -> Iterator[ParameterSet]:
    """Yield the programs that use Ray; all but the first are slow."""
    for number, block in enumerate(block for block in fenced("python") if uses_ray(block)):
        yield pytest.param(*block.values, id=block.id, marks=[pytest.mark.slow] if number else [])


@pytest.mark.parametrize("block", list(ray_blocks()))
def test_python_on_ray_runs(
    block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "an example", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
