"""What can be installed together with mars-ray, by resolving against the package index. Only metadata is downloaded."""

import subprocess
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

uv = pytest.importorskip("uv", reason="uv, which resolves without downloading wheels, is missing: install '.[dev]'")

ROOT = Path(__file__).parents[1]
INDEX = "https://pypi.org/simple"


@pytest.fixture(scope="module", autouse=True)
def _index() -> None:
    try:
        urlopen(f"{INDEX}/pip/", timeout=30).close()
    except URLError as error:
        pytest.skip(f"{INDEX} does not answer: {error.reason}")


def resolve(folder: Path, extras: list[str], requirement: str) -> dict[str, str]:
    """The versions that pip would install for mars-ray together with `requirement` on a Linux machine with CUDA."""
    beside = folder / "requirements.in"
    beside.write_text(f"{requirement}\n")
    options = [word for extra in extras for word in ("--extra", extra)]
    # Without wheels alone, uv would build vLLM's source distribution to read its metadata. The wheels of llguidance
    # need a newer glibc than the one that uv assumes.
    options += ["--only-binary", ":all:", "--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_35"]
    command = [uv.find_uv_bin(), "pip", "compile", "--no-config", "--default-index", INDEX, "--no-annotate", *options]
    process = subprocess.run(
        [*command, str(ROOT / "pyproject.toml"), str(beside)], capture_output=True, text=True, check=False, timeout=280
    )
    assert process.returncode == 0, process.stderr
    return dict(line.split("==", 1) for line in process.stdout.splitlines() if not line.startswith("#"))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["0.29.0", "0.33.0"])
def test_the_extra_vllm_resolves_with_each_supported_vllm(tmp_path: Path, version: str) -> None:
    versions = resolve(tmp_path, ["vllm"], f"vllm=={version}")
    assert versions["vllm"] == version


@pytest.mark.slow
def test_mars_ray_resolves_together_with_ray_serve_llm(tmp_path: Path) -> None:
    versions = resolve(tmp_path, [], "ray[llm]==2.60.0")
    assert (versions["ray"], versions["vllm"]) == ("2.60.0", "0.29.0")
