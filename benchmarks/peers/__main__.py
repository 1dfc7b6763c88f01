"""Compare the engine with other engines, in turns on the same model, prompts, lengths and threads.

    python -m benchmarks.peers --model smollm2 --batch 1,2,4,8,16 --peers llama.cpp,openvino --json peers.json

The other engines are extras of the package: `pip install 'mars-ray[peers-openvino]'`. vLLM has an environment of its
own, which `make .venv-vllm/0.32/.ready` makes.
"""

import argparse
import os
from pathlib import Path

from benchmarks.peers.comparison import compare_peers
from benchmarks.peers.report import report, show
from benchmarks.report import command_line, write_report
from benchmarks.whole_numbers import whole_numbers
from mars_ray.engine.kernels.families import VARIABLE
from mars_ray.program import run_program
from mars_ray.usable_cpus import usable_cpus


def main() -> None:
    """Measure, print, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="a model, as in every command")
    parser.add_argument("--batch", default="1,4,16,32", help="requests decoded together")
    parser.add_argument("--peers", default="llama.cpp,openvino,vllm", help="the other engines")
    parser.add_argument("--threads", type=int, default=usable_cpus(), help="threads of each engine")
    parser.add_argument("--requests", type=int, default=48, help="requests per measurement")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds")
    parser.add_argument("--json", type=Path, help="file for every sample")
    options = parser.parse_args()
    comparison = compare_peers(
        options.model,
        options.peers.split(","),
        whole_numbers(options.batch),
        options.requests,
        options.repeats,
        options.threads,
    )
    show(options.model, options.threads, comparison)
    figures = report(options.model, options.threads, comparison)
    if family := os.environ.get(VARIABLE):
        figures["command"] = f"{VARIABLE}={family} {command_line()}"
    write_report(options.json, figures)


if __name__ == "__main__":
    run_program("benchmarks.peers", main)
