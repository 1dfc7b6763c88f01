"""Show the results of a command as a table, a line of JSON or a JSON file."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mars_ray.errors import OutputError


def show_results(title: str, results: dict[str, Any], as_json: bool) -> None:
    """Print results as a table, and with `as_json` also as one line of JSON."""
    table = Table(title=title, show_header=False)
    for name, value in results.items():
        table.add_row(name.replace("_", " "), f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if as_json:
        print(json.dumps(results))


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write results to a file, unless `path` is None. Raises `OutputError`."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One line for each name, so that diffs show which numbers changed.
        lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in results.items())
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from error
