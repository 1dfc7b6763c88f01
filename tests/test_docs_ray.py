"""What the guides show of programs on Ray works as it stands, on a cluster."""

from pathlib import Path

import pytest

from tests.test_docs import fenced, uses_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("cluster")]


@pytest.mark.parametrize("block", [block for block in fenced("python") if uses_ray(block)])
def test_python_on_ray_runs(
    block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "an example", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
