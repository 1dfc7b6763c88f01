"""Compare the engine with transformers and the paper's decoders, in turns on the same requests.

    python -m benchmarks.decode --model shape:100m --batch 1,16 --json decode.json

`--quick` uses fewer requests and rounds.
"""

import argparse
from pathlib import Path
from typing import get_args

from benchmarks.decode.comparison import compare_decoders, report
from benchmarks.report import write_report
from benchmarks.whole_numbers import whole_numbers
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.program import run_program


def main() -> None:
    """Measure, print, and write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="a model, or a shape with random weights: shape:100m")
    parser.add_argument("--batch", help="requests decoded together; 1,4,16,32 by default, 1,8 with --quick")
    parser.add_argument("--dtype", choices=get_args(DtypeOrAuto), default="auto")
    parser.add_argument("--requests", type=int, help="requests per measurement; 48 by default, 4 with --quick")
    parser.add_argument("--repeats", type=int, help="measured rounds; 5 by default, 2 with --quick")
    parser.add_argument("--quick", action="store_true", help="measure less")
    parser.add_argument("--json", type=Path, help="file for every sample")
    options = parser.parse_args()
    batch = options.batch or ("1,8" if options.quick else "1,4,16,32")
    requests = options.requests or (4 if options.quick else 48)
    repeats = options.repeats or (2 if options.quick else 5)
    if options.quick:
        print(f"quick: {requests} requests and {repeats} rounds; without --quick the figures vary less.")
    results = compare_decoders(options.model, whole_numbers(batch), requests, repeats, options.dtype)
    write_report(options.json, report(options.model, results))


if __name__ == "__main__":
    run_program("benchmarks.decode", main)
