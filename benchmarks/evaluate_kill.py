"""Check that an evaluation that is killed and interrupted ends with the figures of an undisturbed one.

    python -m benchmarks.evaluate_kill --json benchmarks/results/DATE-evaluate-kill.json

The bundled model answers held-out questions of all task families, twice into different folders. The second time it is
stopped as in `STOPS`: while it decodes, judges and measures speed, by `kill -9` or Ctrl-C, each in a start of its own.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from mars_ray.evaluation.results import RESULTS_FILE, Results, read_model
from mars_ray.measure import machine


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop of the evaluation: when and how."""

    line: str
    """Regular expression found in a line of progress."""
    by: signal.Signals
    share: float = 0.0
    """Smallest share of the work in that line."""


STOPS = (
    Stop("tokens/s", signal.SIGKILL, 0.2),
    Stop("tokens/s", signal.SIGINT, 0.5),
    Stop("tokens/s", signal.SIGKILL, 0.8),
    Stop("judge the answers", signal.SIGKILL),
    Stop("measure speed", signal.SIGINT),
)


def main() -> None:
    """Run both, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=278, help="examples of each of 12 families and 3 seeds")
    parser.add_argument("--thresholds", default=".95,.9")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    # Background processes of a shell, and their children, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = [f"--{name}={getattr(given, name)}" for name in ("examples", "thresholds", "workers")]
    with TemporaryDirectory() as place:
        report = measure(Path(place), words)
    Console().print_json(data=report)
    if given.json:
        given.json.write_text(json.dumps(report, indent=2) + "\n")
    if not report["same_figures"]:
        sys.exit("the figures differ")


def measure(place: Path, words: list[str]) -> dict[str, Any]:
    """Return the results of both runs."""
    whole, stopped = place / "whole", place / "stopped"
    started_s = time.monotonic()
    assert run(whole, words) == 0
    whole_s = time.monotonic() - started_s
    stops: list[dict[str, Any]] = []
    started_s = time.monotonic()
    for stop in STOPS:
        stops.append({"by": stop.by.name})
        stops[-1]["exit_code"] = run(stopped, words, stop, stops[-1])
        assert "line" in stops[-1], f"start {len(stops)} ended before {stop} came up"
    assert run(stopped, words) == 0
    one, other = (read_model(folder / RESULTS_FILE, Results) for folder in (whole, stopped))
    return {
        "command": "python -m benchmarks.evaluate_kill",
        "machine": machine(),
        "questions": one.plan.questions,
        "answers": one.plan.questions * len(one.plan.settings),
        "seconds_whole": whole_s,
        "seconds_stopped": time.monotonic() - started_s,
        "stops": stops,
        "same_figures": all(
            getattr(one, name) == getattr(other, name) for name in ("plan", "overall", "tasks", "stops")
        ),
        "overall": {name: figures.model_dump() for name, figures in one.overall.items()},
    }


def run(output: Path, words: list[str], stop: Stop | None = None, seen: dict[str, Any] | None = None) -> int:
    """Start the command, stop it as requested, record the line of progress in `seen`, and return the exit code.

    What it says goes to the standard error.
    """
    program = [
        sys.executable,
        "-c",
        "from mars_ray.cli.main import main; main()",
        "evaluate",
        "--tasks=families",
        *words,
    ]
    with subprocess.Popen(
        [*program, f"--output={output}"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as on:
        assert on.stderr is not None
        for line in on.stderr:
            print(line, end="", file=sys.stderr)
            if stop is None or seen is None or "line" in seen or not re.search(stop.line, line):
                continue
            counted = re.search(r"([\d,]+)/([\d,]+)", line)
            done, total = (int(each.replace(",", "")) for each in counted.groups()) if counted else (0, 1)
            if done >= stop.share * total:
                seen["line"] = line.strip()
                os.kill(on.pid, stop.by)
    return on.returncode


if __name__ == "__main__":
    main()
