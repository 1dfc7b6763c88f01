"""Programs, commands and paths in the README and the guides work as printed."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import typer.core
import typer.main
from _pytest.mark.structures import ParameterSet

from mars_ray.cli.main import app
from mars_ray.model.resolve import resolve_model
from mars_ray.training.config import read_config
from tests.serve.endpoint_samples import Served, config_of, served

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ENDPOINT = "http://127.0.0.1:8000"


def fenced(language: str) -> list[ParameterSet]:
    """Return every code block of a language that needs no vLLM, named by page and number."""
    return [
        pytest.param(block, id=f"{page.name}-{number}")
        for page in PAGES
        for number, block in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL))
        if "ray.data.llm" not in block
    ]


def uses_ray(parameter: ParameterSet) -> bool:
    """Return whether a program needs a cluster; `test_docs_ray` runs such programs."""
    [block] = parameter.values
    return "import ray\n" in str(block) or "from ray " in str(block)


@pytest.mark.parametrize("block", [block for block in fenced("python") if uses_ray(block)])
def test_what_programs_on_ray_import_exists(block: str) -> None:
    for statement in ast.walk(ast.parse(block)):
        if isinstance(statement, ast.ImportFrom):
            module = importlib.import_module(str(statement.module))
            for name in (each.name for each in statement.names):
                assert hasattr(module, name) or importlib.import_module(f"{statement.module}.{name}")


def in_order(parameter: ParameterSet) -> bool:
    """Return whether a program is of a page that runs as a whole; `test_company_ray` runs it."""
    return str(parameter.id).startswith("company.md")


def commands() -> Iterator[object]:
    """Yield every `mars-ray` command line, continuation lines joined."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                line = re.sub(r" >.*", "", line)  # into a file, or in the background
                if line.startswith("mars-ray "):
                    yield pytest.param(line, id=f"{page.name}: {line[9:50]}")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(config_of(storage=str(tmp_path_factory.mktemp("storage")))) as endpoint:
        yield endpoint


@pytest.mark.parametrize("block", [block for block in fenced("python") if not uses_ray(block) and not in_order(block)])
def test_python_runs(block: str, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest) -> None:
    if ENDPOINT in block:
        block = block.replace(ENDPOINT, request.getfixturevalue("stored").url)
    exec(compile(block, "an example", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


def parse(line: str) -> None:
    """Parse a command line as `mars-ray` does, without running it."""
    words = shlex.split(line, comments=True)[1:]
    command = typer.main.get_command(app)
    context = typer.Context(command)
    while isinstance(command, typer.core.TyperGroup):
        name, *words = words
        subcommand = command.get_command(context, name)
        assert subcommand is not None, f"there is no command {name}"
        command = subcommand
        context = typer.Context(subcommand, parent=context)
    command.make_context(command.name, words)


@pytest.mark.parametrize("line", list(commands()))
def test_every_command_parses(line: str) -> None:
    parse(line)


@pytest.mark.parametrize(
    "config", {word for page in PAGES for word in re.findall(r"mars-ray train --config (\S+)", page.read_text())}
)
def test_the_model_and_data_of_a_shown_training_config_exist(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    settings = read_config(Path(config))
    assert resolve_model(settings.model).is_dir()
    assert Path(str(settings.data.train)).is_file() and Path(str(settings.data.heldout)).is_file()


@pytest.mark.parametrize("line", ["mars-ray nonsense", "mars-ray generate --nonsense 1", "mars-ray threshold sit"])
def test_a_wrong_command_does_not_parse(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such option|there is no command"):
        parse(line)


def test_every_block_names_its_language() -> None:
    unknown = {
        (page.name, language)
        for page in PAGES
        for language in re.findall(r"^```(\w*)\n.*?^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        if language not in ("python", "bash", "yaml", "json", "text")
    }
    assert unknown == set()


def test_every_path_in_a_page_exists() -> None:
    text = "".join(
        (ROOT / name).read_text() for name in ("SECURITY.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "tests/README.md")
    )
    text += "".join(page.read_text() for page in PAGES)
    paths = re.findall(r"`((?:benchmarks|docs|mars_ray|pipelines|serve_configs|tests)/[\w./-]+)", text)
    assert sorted({path for path in paths if not (ROOT / path).exists()}) == []


def file_of(path: str) -> Path | None:
    """Return the file or folder that ARCHITECTURE.md names by a path in the repository or in the package."""
    inside = ROOT / "mars_ray"
    candidates = (ROOT / path, inside / path, inside / f"{path}.py")
    return next((candidate for candidate in candidates if candidate.exists()), None)


def test_every_path_in_the_architecture_exists() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    paths = set(re.findall(r"`(\w+(?:/[\w.]+)+)`", text))
    assert len(paths) > 100
    assert sorted(path for path in paths if file_of(path) is None) == []


def test_every_test_in_the_table_of_rules_exists() -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    named = set(re.findall(r"\b(test_\w+\.py)", (ROOT / "tests/README.md").read_text()))
    assert len(named) > 50
    assert sorted(named - tests) == []


def test_every_name_that_the_architecture_gives_with_its_file_is_defined_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    pairs = re.findall(r"`(\w+)` (?:in|of)\s+`([a-z]\w*(?:/[\w.]+)+)`", text)
    assert len(pairs) >= 10
    texts = {path: file.read_text() for _, path in pairs if (file := file_of(path)) and file.is_file()}
    undefined = {
        (name, path)
        for name, path in pairs
        if not re.search(rf"^\s*(?:def |class )?{name}\b", texts.get(path, ""), re.MULTILINE)
    }
    assert undefined == set()
