"""What the README and the guides show works as it stands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from mars_ray.cli.main import app
from mars_ray.serve.deploy.config import ServeConfig
from tests.serve.endpoint_samples import served

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ENDPOINT = "http://127.0.0.1:8000"


def fenced(language: str) -> list[object]:
    """Every block of a language, with where it stands."""
    return [
        pytest.param(block, id=f"{page.name}-{number}")
        for page in PAGES
        for number, block in enumerate(re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL))
    ]


def commands() -> Iterator[object]:
    """Every `mars-ray` command line, with those that it goes on in put together."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("mars-ray "):
                    yield pytest.param(line, id=f"{page.name}: {line[9:50]}")


@pytest.mark.parametrize("block", fenced("python"))
def test_python_runs(block: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    program = compile(block, "an example", "exec")
    if ENDPOINT in block:
        with served(ServeConfig()) as endpoint:
            exec(compile(block.replace(ENDPOINT, endpoint.url), "an example", "exec"), {"__name__": "__main__"})
    else:
        exec(program, {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("line", list(commands()))
def test_commands_are_understood(line: str) -> None:
    words = shlex.split(line, comments=True)[1:]
    # Typer brings a click of its own, so this is no group of click and its commands are not entered.
    command: click.Command = typer.main.get_command(app)  # type: ignore[assignment]
    context = click.Context(command)
    while isinstance(command, click.Group):
        name, *words = words
        found = command.get_command(context, name)
        assert found is not None, f"there is no command {name}"
        command, context = found, click.Context(found, parent=context)
    command.make_context(command.name, words)


def test_every_block_says_its_language() -> None:
    unknown = {
        (page.name, language)
        for page in PAGES
        for language in re.findall(r"^```(\w*)\n.*?^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        if language not in ("python", "bash", "yaml", "json", "text")
    }
    assert unknown == set()
