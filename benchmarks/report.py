"""Write the figures of a benchmark, with the command and the machine that they come from."""

import sys
from pathlib import Path
from typing import Any

from mars_ray.cli.shared import write_json
from mars_ray.measure import machine


def write_report(path: Path | None, figures: dict[str, Any]) -> None:
    """Write figures to a file of JSON, unless `path` is None. The command has only the last part of each path."""
    if path is None:
        return
    command = " ".join(Path(word).name for word in sys.argv)
    write_json(path, {"command": command, "machine": machine(), **figures})
