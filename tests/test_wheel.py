"""What is installed: the wheel as the build would fill it."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from hatchling.builders.wheel import WheelBuilder

from hatch_build import KernelHook
from mars_ray import LLM, SamplingParams
from mars_ray.engine.kernels.families import FAMILIES, KernelError, machine, supported_families

ROOT = Path(__file__).parents[1]
HERE = [family.name for family in FAMILIES if family.machine == machine()]
"""Families of this architecture."""
ONLY_BEST = {"x86_64": "-mamx-bf16", "arm64": "-march=armv8.2-a+dotprod+bf16"}
"""A compiler flag that only the best family of an architecture has."""
QUESTION = "JSON with the keys name, age, city: Oscar, 34, lives in Dallas."
PROGRAM = f"""
import mars_ray
from mars_ray import LLM, SamplingParams

llm = LLM("bundled")
[answer] = llm.chat([{QUESTION!r}], SamplingParams(temperature=0, max_tokens=64))
print(mars_ray.__file__, llm.engine.kernels, answer.outputs[0].text, sep="\\n")
"""


def test_the_wheel_has_every_file_of_the_package_and_the_licence() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone: what belongs to the package cannot be told from what was left there")
    builder = WheelBuilder(str(ROOT))
    shipped = {each.distribution_path for each in builder.recurse_included_files()}
    listed = subprocess.run(["git", "ls-files", "mars_ray"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(listed.stdout.splitlines()) - shipped == set()
    assert {"mars_ray/web/static/chart.js", "mars_ray/web/report.html"} <= shipped
    assert builder.metadata.core.license_files == ["LICENSE"]


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler of nothing that lacks the instructions of the best family. It leaves a file wherever it was called."""
    script = tmp_path / "compiler"
    script.write_text(
        f'#!/bin/sh\ntouch "{tmp_path}/called"\n'
        f'for word; do [ "$word" != "{ONLY_BEST.get(machine())}" ] || exit 1; done\n'
        'while [ "$1" != -o ]; do shift; done\necho library > "$2"\n'
    )
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    return script


def initialized(version: str = "standard") -> tuple[KernelHook, dict[str, Any]]:
    """Let the build hook add to a wheel."""
    builder = WheelBuilder(str(ROOT))
    hook = KernelHook(str(ROOT), {}, builder.config, builder.metadata, str(ROOT), "wheel")
    build_data = builder.get_default_build_data()
    build_data["force_include"] = {}
    hook.initialize(version, build_data)
    return hook, build_data


@pytest.mark.wheel
@pytest.mark.skipif(not HERE, reason="no kernels for this architecture")
def test_a_wheel_has_the_kernels_of_every_family_that_the_compiler_supports(
    compiler: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook, build_data = initialized()
    names = [Path(place).name.partition("-")[0] for place in build_data["force_include"].values()]
    assert names == HERE[1:]
    assert all(Path(file).is_file() for file in build_data["force_include"])
    assert not build_data["pure_python"]
    assert build_data["tag"].startswith("py3-none-") and not build_data["tag"].endswith("any")
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "no CPU kernels" in line] == [
        f"The wheel has no CPU kernels for {HERE[0]}, because {compiler} cannot compile the kernels: exit status 1"
    ]
    hook.finalize("standard", build_data, "")
    assert not any(Path(file).exists() for file in build_data["force_include"])


def test_a_wheel_that_is_built_without_a_compiler_is_pure_and_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    _, build_data = initialized()
    assert (build_data["pure_python"], build_data["force_include"]) == (True, {})
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("The wheel has no CPU kernels, because there is no C++ compiler.")


def test_an_editable_installation_compiles_nothing(compiler: Path) -> None:
    _, build_data = initialized("editable")
    assert build_data["force_include"] == {}
    assert not compiler.with_name("called").exists()


@pytest.mark.wheel
def test_an_installed_wheel_decodes_with_its_kernels_where_there_is_no_compiler(tmp_path: Path) -> None:
    try:
        best = supported_families()[0].name
    except (KernelError, IndexError):
        pytest.skip("no kernels for this processor")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    [wheel] = tmp_path.glob("*.whl")
    site, home = tmp_path / "site", tmp_path / "home"
    ZipFile(wheel).extractall(site)
    environment = {"PATH": "", "HOME": str(home), "PYTHONPATH": str(site)}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    package, kernels, answer = done.stdout.splitlines()
    assert Path(package).is_relative_to(site)
    assert kernels == f"CPU kernels {best} (built in)"
    [expected] = LLM("bundled").chat([QUESTION], SamplingParams(temperature=0, max_tokens=64))
    assert answer == expected.outputs[0].text
    assert not (home / ".cache/mars-ray/kernels").exists()
