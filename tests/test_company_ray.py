"""The page about an endpoint for a company runs as printed, in order, in an empty folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mars_ray.serve.deploy.environment import free_ports

PAGE = Path(__file__).parent.parent / "docs" / "company.md"
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
STOP = "kill -TERM %1\nwait %1 || true\n"


def script_of(text: str, folder: Path) -> str:
    """Write the config and the programs of the page into `folder`, and return one script of its commands."""
    script = "set -e\n"
    for number, (language, block) in enumerate(re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)):
        if language == "yaml":
            (folder / block.split("\n", 1)[0].removeprefix("# ")).write_text(block)
        elif language == "python":
            (folder / f"program{number}.py").write_text(block)
            script += f"python program{number}.py\n"
        else:
            script += block
    return script + STOP


def test_the_page_runs(tmp_path: Path) -> None:
    port = next(free_ports())
    text = PAGE.read_text().replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    script = script_of(text, tmp_path).replace("company.yaml >", f"company.yaml --port {port} >")
    for command in ("models", "status"):
        script = re.sub(rf"^(mars-ray {command} .*)$", rf"\1 --url http://127.0.0.1:{port}", script, flags=re.MULTILINE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=850
    )
    log = tmp_path / "serve.log"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log.read_text() if log.exists() else ''}"
    assert "the model 'acme-style' does not exist here" in done.stdout
    assert "completed BatchRequestCounts(completed=40, failed=0, total=40)" in done.stdout
    assert (tmp_path / "usage.csv").read_text().count("acme") >= 2
    assert "vllm:" in (tmp_path / "metrics.txt").read_text()
