"""Measure how long a model takes until it can answer: the first start from a .gguf file, and later starts.

    python -m benchmarks.first_start MODEL.gguf --baseline ../main --json benchmarks/results/DATE-first-start.json

Each start is a process of its own. Contenders take turns: this checkout, the one of `--baseline`, and llama.cpp's
Python package if it is installed. In a first start the cache folder is empty. "imports" are the seconds until the
package is imported, "start" those from then until the engine takes requests, "CPU" the processor seconds of the process
and its children. The model's file is in the page cache, as after a download.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import write_report
from mars_ray.program import run_program

ROOT = Path(__file__).parents[1]
FORMATS = ("", "int8", "int4")
"""Values of `quantize`; an empty one keeps the weights as they are."""
LLAMA_CPP = "llama.cpp"
CODE = """
import json, resource, sys, time
began_s = time.monotonic()
{imports}
imported_s = time.monotonic()
{start}
started_s = time.monotonic()
cpu_s = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps({{"imports_s": imported_s - began_s, "start_s": started_s - imported_s, "cpu_s": cpu_s}}))
"""
OURS = CODE.format(
    imports="from mars_ray import LLM, EngineOptions",
    start="""
quantize = sys.argv[2] or None
try:
    llm = LLM(sys.argv[1], quantize=quantize)
except TypeError:  # a baseline that takes the options together
    llm = LLM(sys.argv[1], options=EngineOptions(quantize=quantize))
""",
)
THEIRS = CODE.format(
    imports="from llama_cpp import Llama",
    start="llm = Llama(sys.argv[1], n_ctx=2048, verbose=False)",
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A package whose starts are measured."""

    name: str
    code: str
    checkout: Path
    formats: tuple[str, ...]


def start(contender: Contender, model: Path, quantize: str, cache: Path) -> dict[str, float]:
    """Start the model once, and return the times in seconds."""
    checkout = contender.checkout.resolve()
    environment = os.environ | {"PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, "-c", contender.code, str(model), quantize]
    # In the checkout, because Python looks for packages in the working directory first.
    done = subprocess.run(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True, check=True)
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def one_round(contenders: list[Contender], model: Path, later: int) -> Iterator[dict[str, Any]]:
    """Yield a first start and `later` further ones of each contender and format."""
    for quantize in FORMATS:
        for contender in contenders:
            if quantize not in contender.formats:
                continue
            with TemporaryDirectory(dir=model.parent) as cache:
                for number in range(1 + later):
                    kind = "later" if number else "first"
                    times = start(contender, model, quantize, Path(cache))
                    yield {"contender": contender.name, "quantize": quantize or None, "kind": kind} | times


def show(samples: list[dict[str, Any]]) -> None:
    """Print a table of medians."""
    table = Table("contender", "quantize", "start", "imports s", "start s (least to most)", "CPU s")
    keys = list(dict.fromkeys((sample["contender"], sample["quantize"], sample["kind"]) for sample in samples))
    for key in keys:
        rows = [row for row in samples if (row["contender"], row["quantize"], row["kind"]) == key]
        starts = [row["start_s"] for row in rows]
        table.add_row(
            key[0],
            key[1] or "none",
            key[2],
            f"{median(row['imports_s'] for row in rows):.1f}",
            f"{median(starts):.1f} ({min(starts):.1f} to {max(starts):.1f})",
            f"{median(row['cpu_s'] for row in rows):.1f}",
        )
    Console().print(table)


def main() -> None:
    """Measure, print the table, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("--baseline", type=Path, help="checkout to compare with")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--later", type=int, default=2, help="later starts after each first one")
    parser.add_argument("--json", type=Path, help="file for all samples")
    arguments = parser.parse_args()
    if not arguments.model.is_file():
        parser.error(f"{arguments.model} does not exist; give a .gguf file")
    contenders = [Contender("this checkout", OURS, ROOT, FORMATS)]
    if arguments.baseline:
        contenders.append(Contender("baseline", OURS, arguments.baseline, FORMATS))
    if find_spec("llama_cpp"):
        contenders.append(Contender(LLAMA_CPP, THEIRS, ROOT, ("",)))
    samples: list[dict[str, Any]] = []
    for number in range(arguments.repeat):
        # Each goes first in turn, so that none always follows the same one.
        turn = contenders[number % len(contenders) :] + contenders[: number % len(contenders)]
        samples += one_round(turn, arguments.model.absolute(), arguments.later)
    show(samples)
    write_report(arguments.json, {"model_bytes": arguments.model.stat().st_size, "samples": samples})


if __name__ == "__main__":
    run_program("benchmarks.first_start", main)
