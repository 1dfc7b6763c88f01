"""Measure everything on a GPU, in under 20 minutes; each part alone takes under 8.

    python -m benchmarks.gpu.run --model runs/model --json gpu.json
    python -m benchmarks.gpu.run --part torch --json gpu.json             # an image without vLLM
    python -m benchmarks.gpu.run --device cpu --small --json try.json     # to try the program

`speed` compares MARS inside vLLM with stock vLLM and its n-gram speculation: answers and tokens per second. `graphs`
repeats one engine with CUDA graphs full, piecewise and off. `torch` needs no vLLM: our torch runner and training. Each
part that ends is written at once, so a later failure loses nothing. The limits are enforced, but no GPU has shown yet
that the parts end within them.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from benchmarks.gpu.settings import gpu_of, step_model
from benchmarks.gpu.vllm_part import equality, graph_engines, predictions, run_engines, speed_engines
from mars_ray.machines.step_model import StepModel
from mars_ray.measure import machine
from mars_ray.model.folder import count_parameters
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program

PART_LIMITS_S = {"speed": 480, "graphs": 330, "torch": 360}
TOKENS_PER_SEQ = 128
"""Mean number of cached tokens of a request: a prompt of about 64, and half of an answer of 128."""


def torch_part(arguments: argparse.Namespace, gpu: str, folder: Path) -> dict[str, Any]:
    """Run the part without vLLM in its own process; return its report, or the reason why it has none."""
    with TemporaryDirectory() as scratch:
        target = Path(scratch) / "torch.json"
        command = [sys.executable, "-m", "benchmarks.gpu.torch_part", "--model", str(folder), "--gpu", gpu]
        command += ["--device", arguments.device, "--json", str(target), *["--small"] * arguments.small]
        try:
            process = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=PART_LIMITS_S["torch"]
            )
        except subprocess.TimeoutExpired:
            return {"unavailable": f"not done after {PART_LIMITS_S['torch']} s"}
        if process.returncode:
            return {"unavailable": (process.stderr.strip().splitlines() or ["no output"])[-1]}
        report: dict[str, Any] = json.loads(target.read_text())
        return report


def vllm_part(name: str, arguments: argparse.Namespace, folder: Path, model: StepModel) -> dict[str, Any]:
    """Run the engines of a part, and compare their answers and speeds."""
    engines = speed_engines(arguments.small) if name == "speed" else graph_engines(arguments.small)
    reports = run_engines(engines, folder, arguments.device, arguments.small, PART_LIMITS_S[name])
    return {
        "engines": reports,
        "equality": equality(reports),
        "speed": list(predictions(reports, model, TOKENS_PER_SEQ)),
    }


def show(report: dict[str, Any]) -> None:
    """Print the tables of the parts that are there."""
    console = Console()
    title = f"{report['model']} on {report['machine']['gpu'] or 'a CPU'}; modelled for {report['gpu']}"
    table = Table("engine", "setting", "callers", "tokens/s", "modelled", "tokens/step", title=title)
    for part in ("speed", "graphs"):
        for name, engine in report.get(part, {}).get("engines", {}).items():
            if "unavailable" in engine:
                console.print(f"{name}: {engine['unavailable']}", markup=False)
        for row in report.get(part, {}).get("speed", ()):
            table.add_row(row["engine"], *_cells(row))
    ours = report.get("torch", {})
    if "unavailable" in ours:
        console.print(f"torch: {ours['unavailable']}", markup=False)
    for row in ours.get("steps", ()):
        table.add_row("torch runner", *_cells(row))
    console.print(table)
    for name, counts in report.get("speed", {}).get("equality", {}).items():
        console.print(f"{name}: {counts}", markup=False)
    if "equality" in ours:
        console.print(f"torch runner, of {ours['equality']['prompts']} answers equal: {ours['equality']['equal']}")


def _cells(row: dict[str, Any]) -> list[str]:
    modelled = row["modelled_tokens_per_s"]
    return [
        row["setting"],
        str(row["callers"]),
        f"{row['tokens_per_s']:,.0f}",
        "" if modelled is None else f"{modelled:,.0f}",
        f"{row['tokens_per_step']:.2f}" if "tokens_per_step" in row else "",
    ]


def main() -> None:
    """Run the parts, write after each, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="folder of a checkpoint with its card")
    parser.add_argument("--part", choices=tuple(PART_LIMITS_S), action="append", help="default: all parts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu", help="entry of mars_ray/machines/gpus to compare with; default: the device's own")
    parser.add_argument("--small", action="store_true", help="a few prompts and steps, to try the program")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    gpu = arguments.gpu or (gpu_of(torch.cuda.get_device_name()) if arguments.device == "cuda" else "h100")
    folder = resolve_model(arguments.model)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = step_model(gpu, config, count_parameters(folder).total())
    report: dict[str, Any] = {"machine": machine(), "gpu": gpu, "model": arguments.model, "device": arguments.device}
    for part in arguments.part or PART_LIMITS_S:
        report[part] = (
            torch_part(arguments, gpu, folder) if part == "torch" else vllm_part(part, arguments, folder, model)
        )
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report)


if __name__ == "__main__":
    run_program("benchmarks.gpu.run", main)
