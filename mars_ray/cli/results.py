"""How commands show their results: a table, a JSON line, a JSON file."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mars_ray.errors import OutputError


def show_results(title: str, results: dict[str, Any], as_json: bool) -> None:
    """Print results as a table and, when asked, as one JSON line."""
    table = Table(title=title, show_header=False)
    for name, value in results.items():
        table.add_row(name.replace("_", " "), f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    if as_json:
        print(json.dumps(results))


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write results to a file, if one is given. Raises `OutputError`."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line for each name, and all samples on one: whoever reads a diff reads the numbers.
        lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in results.items())
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from error
