"""Write the figures of a benchmark, with the command and the machine that they come from."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from mars_ray.cli.shared import write_json
from mars_ray.errors import ConfigError
from mars_ray.measure import machine

ROOT = Path(__file__).resolve().parents[1]

Json = dict[str, Any]


def write_report(path: Path | None, figures: Json) -> None:
    """Write figures to a file of JSON, unless `path` is None."""
    if path is not None:
        write_json(path, {"command": command_line(), "machine": machine(), **figures})


def command_line() -> str:
    """Return the command that started this program, with only the last part of each absolute path."""
    program, *words = sys.argv
    module = Path(program).resolve().relative_to(ROOT).with_suffix("")
    name = ".".join(module.parts).removesuffix(".__main__")
    return shlex.join(["python", "-m", name, *map(_shortened, words)])


def _shortened(word: str) -> str:
    path = Path(word)
    # A file that the program writes may be missing so far, but its folder exists.
    return path.name if path.is_absolute() and path.parent.exists() else word


def report_so_far(path: Path | None, settings: Json) -> Json:
    """Return the report in `path`, or a new one with the settings and the machine if there is none.

    Raises a `ConfigError` if the report was made with other settings, on another machine or at another commit.
    """
    facts: Json = machine()
    if path is None or not path.exists():
        return settings | {"machine": facts}
    report: Json = json.loads(path.read_text())
    facts.pop("uncommitted_changes")  # the report itself may be such a change
    refuse_others(path, report.get("machine", {}) | report, settings | facts)
    return report


def refuse_others(path: Path, before: Json, settings: Json) -> None:
    """Raise a `ConfigError` if the figures in `path` were made with other settings."""
    for name, value in settings.items():
        if before.get(name) != value:
            raise ConfigError(f"{path}: {name} was {before.get(name)}, now it is {value}. Give another --json.")
