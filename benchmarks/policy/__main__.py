"""Compare policies on simulated clusters: fixed thresholds, policies of other engines, ours, and an oracle.

    python -m benchmarks.policy --trace conv.csv.gz --trace code.csv.gz --json policy.json

Traces come from github.com/Azure/AzurePublicDataset.
"""

import argparse
from pathlib import Path

from benchmarks.policy.comparison import PolicyOptions, compare_policies
from benchmarks.report import write_report
from mars_ray.program import run_program
from mars_ray.storage.location import locate


def main() -> None:
    """Simulate, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", required=True, help="Azure trace .csv.gz or its URL; repeatable")
    parser.add_argument("--machine", help="name or file of a machine, as in mars-ray simulate")
    parser.add_argument("--replicas", type=int, default=2, help="engines")
    parser.add_argument("--rows", type=int, default=16, help="sequences decoded together in each")
    parser.add_argument("--prompt-scale", type=float, default=1 / 8, help="factor on prompt lengths")
    parser.add_argument("--output-scale", type=float, default=1.0, help="factor on answer lengths")
    parser.add_argument("--slo", default="ttft:1000,tpot:30", help="SLO of a request, in ms")
    parser.add_argument("--seed", type=int, default=0, help="seed of routing and of generated arrivals")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    options = PolicyOptions(
        traces=tuple(map(locate, arguments.trace)),
        machine=arguments.machine,
        replicas=arguments.replicas,
        rows=arguments.rows,
        prompt_scale=arguments.prompt_scale,
        output_scale=arguments.output_scale,
        slo=(arguments.slo,),
        seed=arguments.seed,
    )
    write_report(arguments.json, compare_policies(options))


if __name__ == "__main__":
    run_program("benchmarks.policy", main)
