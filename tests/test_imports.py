"""The rules of ARCHITECTURE.md about who imports whom."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mars_ray

ROOT = Path(mars_ray.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
BELOW = {
    "errors": set(),
    "progress": set(),
    "program": {"errors"},
    "method": {"errors"},
    "model": {"errors"},
    "ray_cluster": {"errors"},
    "data": {"errors", "progress", "method", "model"},
    "train": {"errors", "progress", "ray_cluster", "method", "model", "data"},
    "engine": {"errors", "method", "model"},
    "control": {"errors", "engine"},
    "batch": {"errors", "progress", "ray_cluster", "method", "model", "data", "engine", "control", "serve"},
    "serve": {"errors", "ray_cluster", "model", "data", "engine", "control"},
    "evaluate": {"errors", "progress", "method", "model", "data", "engine", "batch", "bench"},
    "rivals": {"errors", "method"},
    "harness": {"errors", "program", "progress", "method", "model", "engine", "evaluate"},
    "simulate": {"errors", "progress", "data", "model", "engine", "control", "bench"},
    "bench": {"errors", "progress", "method", "model", "data", "engine", "control"},
}
"""What the files of a part may import besides their own."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (
                [f"mars_ray.{alias.name}" for alias in node.names] if node.module == "mars_ray" else [node.module]
            )


def test_everything_but_the_shells_imports_without_ray() -> None:
    cores = [name_of(path) for path in MODULES if not path.name.startswith("ray_")]
    blocked = (
        "import sys; sys.modules['ray'] = None; import importlib; [importlib.import_module(m) for m in sys.argv[1:]]"
    )
    done = subprocess.run([sys.executable, "-c", blocked, *cores], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_shells_import_ray() -> None:
    importing = [p.name for p in MODULES if any(name.split(".")[0] == "ray" for name in imports_of(p))]
    assert importing
    assert [name for name in importing if not name.startswith("ray_")] == []


def test_parts_import_one_way() -> None:
    wrong = []
    for path in MODULES:
        part = path.relative_to(ROOT).with_suffix("").parts[0]
        for name in imports_of(path):
            other = name.split(".")[1] if name.startswith("mars_ray.") else part
            if part in BELOW and other not in BELOW[part] | {part}:
                wrong.append(f"{name_of(path)} imports {name}")
    assert wrong == []


def test_every_part_has_its_rule() -> None:
    tops = {
        "__init__",
        "cli",
        "cli_control",
        "cli_evaluate",
        "cli_generate",
        "cli_keys",
        "ray_demo",
        "assets",
    }  # the command line and the demo may use everything
    parts = {
        path.stem if path.is_file() else path.name for path in ROOT.iterdir() if not path.name.startswith(("_", "py"))
    }
    assert parts - tops == set(BELOW)


def test_nothing_imports_the_command_line() -> None:
    assert [name_of(path) for path in MODULES if "mars_ray.cli" in imports_of(path)] == []
