"""Keep figures in a file of JSON lines, one after each measurement, so that a run that is cut keeps what it had."""

import json
from pathlib import Path
from typing import Any


def append(file: Path, line: dict[str, Any]) -> None:
    """Append one line to `file`, and print it if it is short."""
    text = json.dumps(line)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(text + "\n")
    if len(text) < 400:
        print(text, flush=True)


def last_run(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of the last run, which begins with its machine and model."""
    return lines[max((number for number, line in enumerate(lines) if "machine" in line), default=0) :]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the whole lines of `file`; a last line that was cut is left out."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines(keepends=True) if line[-1] == "\n"]
