"""The core without the folder of the platform: its tests pass, and `mars-ray serve` answers."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest

import mars_ray
from mars_ray.installed import HAS_PLATFORM
from tests.store_server import free_port

ROOT = Path(mars_ray.__file__).parents[1]
HEAVY = shutil.ignore_patterns("__pycache__", "results")

pytestmark = pytest.mark.skipif(not HAS_PLATFORM, reason="there is no platform to leave out")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository without the platform."""
    folder = tmp_path_factory.mktemp("core")
    for name in ("mars_ray", "tests", "serve_configs", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=HEAVY)
    for name in ("pyproject.toml", "README.md", "ARCHITECTURE.md", "SECURITY.md"):
        shutil.copy(ROOT / name, folder / name)
    shutil.rmtree(folder / "mars_ray/platform")
    return folder


def environment(core: Path) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"PYTHONPATH": str(core)}


def test_the_core_never_speaks_of_accounts() -> None:
    speaking = [path.name for path in (ROOT / "mars_ray/serve").rglob("*.py") if "account" in path.read_text().lower()]
    assert speaking == []


def test_the_core_imports_without_the_platform(core: Path) -> None:
    names = "mars_ray.installed, mars_ray.cli.main, mars_ray.ray_serve"
    program = f"import {names}; print(mars_ray.installed.HAS_PLATFORM, mars_ray.__file__)"
    told = subprocess.run(
        [sys.executable, "-c", program], cwd=core, env=environment(core), capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["False", str(core / "mars_ray/__init__.py")]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tests_of_the_core_pass_without_the_platform(core: Path) -> None:
    chosen = ["-m", "not (ray or slow or browser or fidelity or sanitizers or wheel or gpu)"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen, "tests/serve", "tests/control"],
        cwd=core,
        env=environment(core),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:]


@contextmanager
def serving(core: Path, port: int) -> Iterator[None]:
    command = [sys.executable, "-m", "mars_ray", "serve", "--port", str(port)]
    with subprocess.Popen(command, cwd=core, env=environment(core), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout and process.stdout.readline().startswith("ready")
            yield
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 0


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_serve_answers_without_the_platform(core: Path) -> None:
    port = free_port()
    with serving(core, port), httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        body = {"messages": [{"role": "user", "content": "JSON with the keys name, age: Oscar, 34."}]}
        answer = client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["choices"][0]["finish_reason"]) == (200, "stop")
        assert client.post("/v1/responses", json={"input": "a"}).status_code == 404
        assert "/v1/messages" not in client.get("/openapi.json").json()["paths"]
