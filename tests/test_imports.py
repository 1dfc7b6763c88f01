"""The rules of ARCHITECTURE.md about who imports whom: one way, and Ray only in shells."""

import ast
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import mars_ray
from mars_ray.batch.rows.openai_format import OpenAIFormatSettings
from mars_ray.batch.rows.plain_format import PlainFormatSettings
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.model.folder import open_model

ROOT = Path(mars_ray.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
SHARED = {"errors", "program", "progress", "ray_actor", "ray_cluster", "ray_private", "storage", "usable_cpus", "web"}
"""Small parts that everything above `method` and `model` may use."""
BELOW = {
    "errors": set(),
    "program": {"errors"},
    "progress": set(),
    "machines": {"errors"},
    "measure": {"progress", "usable_cpus"},
    "ray_actor": {"errors", "ray_private"},
    "ray_cluster": {"errors", "ray_private", "storage", "usable_cpus"},
    "ray_private": set(),
    "cgroups": set(),
    "usable_cpus": {"cgroups"},
    "usable_memory": {"cgroups"},
    "web": set(),
    "storage": {"errors"},
    "method": {"errors"},
    "model": {"errors", "progress", "storage", "usable_cpus"},
    "chat": {"errors"},
    "data": SHARED | {"chat", "method", "model"},
    "adapter": {"errors", "method", "model"},
    "training": SHARED | {"method", "model", "data", "adapter"},
    "engine": {"errors", "machines", "method", "model", "adapter", "usable_cpus", "usable_memory", "storage"},
    "control": {"errors", "ray_actor", "ray_private", "storage", "engine"},
    "traces": {"errors", "engine"},
    "openai_api": {"errors", "chat", "data", "engine"},
    "batch": SHARED
    | {"machines", "method", "model", "adapter", "chat", "data", "engine", "control", "openai_api", "traces"},
    "serve": SHARED
    | {
        "machines",
        "model",
        "adapter",
        "chat",
        "data",
        "engine",
        "control",
        "openai_api",
        "traces",
    },
    "ray_data": {"batch"},
    "platform": SHARED
    | {"adapter", "batch", "chat", "cli", "control", "engine", "model", "openai_api", "serve", "traces"},
    "installed": {"serve", "platform"},
    "ray_serve": {"installed", "serve", "platform"},
    "ray_llm": {"control", "serve", "vllm"},
    "load": SHARED | {"data", "measure"},
    "simulate": SHARED | {"machines", "data", "model", "engine", "control", "load"},
    "evaluation": SHARED | {"method", "model", "adapter", "data", "engine", "batch", "measure"},
    "llm": SHARED | {"chat", "data", "engine", "model", "adapter", "openai_api"},
    "vllm": {"errors", "method", "model", "adapter", "engine", "control"},
    "harness": SHARED | {"method", "model", "engine", "evaluation"},
    "demo": SHARED | {"data", "model", "adapter", "engine", "measure", "batch", "evaluation"},
}
"""Parts, and what the files of each may import besides their own."""
ROOMS = {
    "engine": [
        "grammar",
        "drafting",
        "",
        "kv",
        "scheduling",
        "stats",
        "kernels",
        "execution",
        "sampling",
        "core",
        "process",
    ],
    "control": ["", "policies", "core"],
    "batch": ["", "rows", "output", "run", "ray"],
    "serve": ["", "middleware", "deploy", "replicas", "http", "ray"],
    "vllm": ["", "runner", "engine", "agent"],
}
"""The rooms of a part, lowest first ("": its own files): each may import those before it."""


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in MODULES}


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield module if module in NAMES else node.module


def is_shell(path: Path) -> bool:
    return path.name.startswith("ray_") or path.parent.name == "ray"


def room_of(name: str, part: str) -> str:
    """The room a module lies in, or "" if it lies in the part itself."""
    below = name.split(".")[2:]
    return below[0] if below and (ROOT / part / below[0]).is_dir() else ""


def needs_vllm(path: Path) -> bool:
    return path.is_relative_to(ROOT / "vllm/runner") or path == ROOT / "vllm/engine/llm_engine.py"


def test_only_the_runner_and_one_file_of_the_engine_import_vllm() -> None:
    importing = [path for path in MODULES if any(name.split(".")[0] == "vllm" for name in imports_of(path))]
    assert importing
    assert [name_of(path) for path in importing if not needs_vllm(path)] == []


def test_everything_but_the_shells_imports_without_ray() -> None:
    cores = [
        name_of(path) for path in MODULES if not is_shell(path) and not needs_vllm(path) and path.name != "__main__.py"
    ]
    blocked = (
        "import sys; sys.modules['ray'] = None; import importlib; [importlib.import_module(m) for m in sys.argv[1:]]"
    )
    done = subprocess.run([sys.executable, "-c", blocked, *cores], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_runs_beside_engines_loads_no_torch() -> None:
    shells = ["batch.run.row_store", "batch.ray.shared_pool", "batch.ray.endpoint_rows", "batch.ray.decoder"]
    shells += ["serve.ray.gateway", "serve.ray.engine_replica", "control.core.ray_controller"]
    names = [f"mars_ray.{each}" for each in shells]
    loading = (
        "import sys, importlib\nfor m in sys.argv[1:]: importlib.import_module(m); 'torch' in sys.modules and print(m)"
    )
    done = subprocess.run([sys.executable, "-c", loading, *names], capture_output=True, text=True, check=True)
    assert done.stdout == "", "the first of these loads torch"


def test_a_decoder_loads_no_transformers_before_it_keeps_torch_out() -> None:
    loading = "import sys, mars_ray.batch.ray.decoder; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", loading], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_decoder_reads_rows_without_torch_beside_the_engine_that_has_it() -> None:
    plain = PlainFormatSettings(sampling=SamplingParams(), decode=DecodeParams())
    formats = (plain, OpenAIFormatSettings(model_name="bundled", decode=DecodeParams()))
    opened = """
import pickle, sys
sys.modules["torch"] = None
formats, model = pickle.load(sys.stdin.buffer)
for settings in formats:
    settings.open(model)
"""
    sent = pickle.dumps((formats, open_model("bundled")))
    done = subprocess.run([sys.executable, "-c", opened], input=sent, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_only_shells_import_ray() -> None:
    importing = [path for path in MODULES if any(name.split(".")[0] == "ray" for name in imports_of(path))]
    assert importing
    assert [name_of(path) for path in importing if not is_shell(path)] == []


def test_private_parts_of_ray_are_named_in_one_file_alone() -> None:
    naming = []
    for path in MODULES:
        for node in nodes_of(path):
            match node:
                case ast.ImportFrom(module=str(module)):
                    names = [f"{module}.{alias.name}" for alias in node.names]
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case ast.Attribute():
                    names = [ast.unparse(node)]
                case ast.keyword(arg=str(argument)):
                    names = [f"ray.{argument}"] if argument == "_blocking" else []
                case _:
                    names = []
            private = [each for each in names if re.match(r"(ray|serve)\b.*\.(_(?!_)|experimental\b)", each)]
            naming += [name_of(path)] if private else []
    assert set(naming) == {"mars_ray.ray_private"}


def test_parts_import_one_way() -> None:
    wrong = []
    for path in MODULES:
        part = path.relative_to(ROOT).with_suffix("").parts[0]
        for name in imports_of(path):
            other = name.split(".")[1] if name.startswith("mars_ray.") else part
            if part in BELOW and other not in BELOW[part] | {part}:
                wrong.append(f"{name_of(path)} imports {name}")
    assert wrong == []


@pytest.mark.parametrize("part", sorted(ROOMS))
def test_rooms_of_a_part_import_one_way(part: str) -> None:
    order = ROOMS[part]
    wrong = []
    for path in (ROOT / part).rglob("*.py"):
        here = order.index(room_of(name_of(path), part))
        for name in imports_of(path):
            if name.startswith(f"mars_ray.{part}.") and order.index(room_of(name, part)) > here:
                wrong.append(f"{name_of(path)} imports {name}")
    assert wrong == []


def test_every_part_has_its_rule() -> None:
    tops = {"__init__", "__main__", "cli"}  # the command line may use everything
    parts = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in MODULES}
    assert parts - tops == set(BELOW)


def test_nothing_imports_the_command_line() -> None:
    importing = [
        name_of(path)
        for path in MODULES
        if path.parent.name != "cli" and any(name.startswith("mars_ray.cli") for name in imports_of(path))
    ]
    assert importing == ["mars_ray.__main__"]


ARCHITECTURE = (ROOT.parent / "ARCHITECTURE.md").read_text()


def test_the_table_of_the_architecture_is_this_one() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| ([^|]*)\|$", ARCHITECTURE, re.MULTILINE))
    told = {
        part: set(re.findall(r"`(\w+)`", allowed)) | (SHARED if "shared" in allowed else set())
        for part, allowed in rows.items()
        if part != "cli"
    }
    assert told == BELOW
