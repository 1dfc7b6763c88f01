"""Check that an evaluation that is killed and interrupted ends with the figures of an undisturbed one.

    python -m benchmarks.evaluate_kill --json benchmarks/results/DATE-evaluate-kill.json

The bundled model answers held-out questions of all task families twice, into different folders. The second run is
stopped as listed in `STOPS`: by `kill -9` or Ctrl-C, while it decodes, judges or measures speed, once per start.
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
    """Regular expression that a line of progress must match."""
    by: signal.Signals
    share: float = 0.0
    """Smallest share of finished work in that line."""


STOPS = (
    Stop("tokens/s", signal.SIGKILL, 0.2),
    Stop("tokens/s", signal.SIGINT, 0.5),
    Stop("tokens/s", signal.SIGKILL, 0.8),
    Stop("judge the answers", signal.SIGKILL),
    Stop("measure speed", signal.SIGINT),
)


def main() -> None:
    """Run both evaluations, compare their figures, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=278, help="examples of each of 12 families and 3 seeds")
    parser.add_argument("--thresholds", default=".95,.9")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    # Background processes of a shell, and their children, ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words = [f"--{name}={getattr(arguments, name)}" for name in ("examples", "thresholds", "workers")]
    with TemporaryDirectory() as folder:
        report = measure(Path(folder), words)
    Console().print_json(data=report)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    if not report["same_figures"]:
        sys.exit("the figures differ")


def measure(folder: Path, words: list[str]) -> dict[str, Any]:
    """Return the results of both runs."""
    whole_folder = folder / "whole"
    stopped_folder = folder / "stopped"
    started_s = time.monotonic()
    assert run(whole_folder, words) == 0
    whole_s = time.monotonic() - started_s
    stops: list[dict[str, Any]] = []
    started_s = time.monotonic()
    for stop in STOPS:
        stops.append({"by": stop.by.name})
        stops[-1]["exit_code"] = run(stopped_folder, words, stop, stops[-1])
        assert "line" in stops[-1], f"start {len(stops)} ended before {stop} came up"
    assert run(stopped_folder, words) == 0
    undisturbed, resumed = (read_model(folder / RESULTS_FILE, Results) for folder in (whole_folder, stopped_folder))
    return {
        "command": "python -m benchmarks.evaluate_kill",
        "machine": machine(),
        "questions": undisturbed.plan.questions,
        "answers": undisturbed.plan.questions * len(undisturbed.plan.settings),
        "seconds_whole": whole_s,
        "seconds_stopped": time.monotonic() - started_s,
        "stops": stops,
        "same_figures": all(
            getattr(undisturbed, name) == getattr(resumed, name) for name in ("plan", "overall", "tasks", "stops")
        ),
        "overall": {name: figures.model_dump() for name, figures in undisturbed.overall.items()},
    }


def run(output: Path, words: list[str], stop: Stop | None = None, record: dict[str, Any] | None = None) -> int:
    """Start the command, stop it as requested, and return the exit code.

    The line of progress at the stop goes into `record`; all output goes to the standard error.
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
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            if stop is None or record is None or "line" in record or not re.search(stop.line, line):
                continue
            count_match = re.search(r"([\d,]+)/([\d,]+)", line)
            done, total = (int(count.replace(",", "")) for count in count_match.groups()) if count_match else (0, 1)
            if done >= stop.share * total:
                record["line"] = line.strip()
                os.kill(process.pid, stop.by)
    return process.returncode


if __name__ == "__main__":
    main()
