"""Compare objectives of adapter training at equal numbers of tokens, by what exact mode accepts.

    mars-ray prepare --input own.jsonl --model smollm2 --output packed/own     # the model's own answers
    mars-ray prepare --input heldout.jsonl --model smollm2 --output packed/heldout
    python -m benchmarks.objective --model smollm2 --train packed/own --heldout packed/heldout --tokens 125000 \\
        --json benchmarks/results/DATE-objective.json

Each objective trains an adapter of its own with each seed, in turns. The adapter of the best measurement on the first
held-out rows is kept, and judged by the tokens per forward on the other held-out rows, which are the same for all.
`people` trains on the answers in `--people` instead of the model's own. With `--init` all begin with the same trained
adapter, so objectives are compared late in training.
"""

import argparse
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from benchmarks.report import write_report
from mars_ray.adapter.card import resolve_adapter
from mars_ray.adapter.folder import load_adapter
from mars_ray.adapter.loss import AdapterLoss, heldout_masks
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.data.packed import PackedData
from mars_ray.method import tiles
from mars_ray.method.heldout import HeldoutLookahead
from mars_ray.method.streams import random_phases
from mars_ray.model.checkpoint import load_model
from mars_ray.model.dtype import Dtype, resolve_dtype
from mars_ray.model.folder import ResolvedModel, open_model
from mars_ray.program import run_program
from mars_ray.training.config import TrainConfig, parse_config
from mars_ray.training.loop import TrainingRun, new_accelerator
from mars_ray.training.run_folder import RunFolder
from pipelines.reproduction.training import LocalStore

OBJECTIVES: dict[str, dict[str, Any]] = {
    "cross-entropy": {},
    "total variation": {"total_variation": 1.0},
    "0.9 total variation": {"total_variation": 0.9},
    "0.5 total variation": {"total_variation": 0.5},
    "growing blocks": {"growth": True},
    "people": {},
}
BATCH_ROWS = 4
SELECTION_ROWS = 16
"""Held-out rows that choose the adapter to keep."""


def main() -> None:
    """Train and judge each objective with each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--train", type=Path, required=True, help="packed rows, from `mars-ray prepare`")
    parser.add_argument("--people", type=Path, help="packed rows with the answers of people")
    parser.add_argument("--heldout", type=Path, required=True, help="packed rows")
    parser.add_argument("--tokens", type=int, default=125_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--init", help="adapter to begin with: a folder or a name, of the same rank")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--test-rows", type=int, default=32)
    parser.add_argument("--objective", action="append", choices=OBJECTIVES, help="repeatable; all without it")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    chosen = [name for name in arguments.objective or OBJECTIVES if name != "people" or arguments.people]
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    for seed in range(arguments.seeds):
        for name in chosen:
            results[name].append(trained(arguments, name, seed))
            show(results)
            write_report(arguments.json, {"results": results})


def trained(arguments: argparse.Namespace, name: str, seed: int) -> dict[str, Any]:
    """Train an adapter and return what it does on held-out rows."""
    model = open_model(arguments.model)
    data = arguments.people if name == "people" else arguments.train
    rows = PackedData(data)
    with TemporaryDirectory() as temporary:
        output = Path(temporary) / "run"
        (output / "data").mkdir(parents=True)
        (output / "data" / "train").symlink_to(data.absolute())
        (output / "data" / "heldout").symlink_to(arguments.heldout.absolute())
        config = config_of(arguments, OBJECTIVES[name], seed, rows, output, model)
        started_s = time.perf_counter()
        state = TrainingRun(config, model.folder, new_accelerator(config.compute), LocalStore(output / "s")).run()
        seconds = time.perf_counter() - started_s
        found = judged(arguments, model, RunFolder(output).model_here())
    return {
        "seed": seed,
        "tokens": state.tokens,
        "seconds": round(seconds),
        "best_step": state.best_steps,
        "tokens_per_forward": found.tokens_per_forward,
        "by_offset": found.by_offset,
    }


def config_of(
    arguments: argparse.Namespace,
    objective: dict[str, Any],
    seed: int,
    rows: PackedData,
    output: Path,
    model: ResolvedModel,
) -> TrainConfig:
    """Return the settings of a run over so many tokens, whatever the length of the data is."""
    length = rows.rows([0]).tokens_RT.shape[1]
    steps = -(-arguments.tokens // (BATCH_ROWS * length))
    init = resolve_adapter(arguments.init)
    adapter = {"rank": arguments.rank, "init": str(init) if init else None}
    fields = {
        "model": str(model.folder),
        "output": str(output),
        "data": {"train": str(output), "heldout": str(output), "length": length},
        "objective": {"kind": "mars", "block": arguments.block, "growth": False, "decay": 0.85, "adapter": adapter}
        | objective,
        "optimizer": {
            "learning_rate": arguments.learning_rate,
            "epochs": steps * BATCH_ROWS / len(rows),
            "batch_rows": BATCH_ROWS,
            "micro_rows": BATCH_ROWS,
        },
        "compute": {"precision": precision_of(model)},
        "checkpoint_every": 10**6,
        "measure_every": max(1, steps // 5),
        "measure_rows": SELECTION_ROWS,
        "seed": seed,
    }
    return parse_config(fields, "benchmarks.objective")


def precision_of(model: ResolvedModel) -> Dtype:
    """Return the precision in which torch is fast with a model on this machine."""
    return resolve_dtype("auto", model.parameters, "cpu").name


def judged(arguments: argparse.Namespace, model: ResolvedModel, adapter: Path) -> HeldoutLookahead:
    """Measure an adapter on the held-out rows that did not choose it."""
    network = load_model(model, dtype=getattr(torch, precision_of(model)), attention="sdpa").network
    network.set_attn_implementation(tiles.ATTENTION)
    lora = load_adapter(adapter, model.folder).lora
    lora.attach(network)
    AdapterLoss(network, lora, 1.0)
    rows = PackedData(arguments.heldout)
    numbers = range(SELECTION_ROWS, min(len(rows), SELECTION_ROWS + arguments.test_rows))
    selected = rows.rows(numbers)
    masks = arguments.block - 1
    phase_RT = random_phases(selected, masks, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision_of(model) == "bfloat16"):
        streams = mask_streams(selected, masks=masks, phase_RT=phase_RT)
        return HeldoutLookahead.of(heldout_masks(network, lora, streams))


def show(results: dict[str, list[dict[str, Any]]]) -> None:
    """Print a table of the objectives."""
    table = Table("objective", "tokens per forward", "seeds", "first masks right", "best step", "seconds a run")
    for name, runs in results.items():
        if runs:
            ahead = [run["tokens_per_forward"] for run in runs]
            spread = f" ± {statistics.stdev(ahead):.3f}" if len(ahead) > 1 else ""
            offsets = zip(*(run["by_offset"] for run in runs), strict=True)
            shares = " ".join(f"{100 * statistics.mean(right):.0f}" for right in offsets)
            steps = " ".join(str(run["best_step"]) for run in runs)
            seconds = f"{statistics.mean(run['seconds'] for run in runs):.0f}"
            table.add_row(name, f"{statistics.mean(ahead):.3f}{spread}", str(len(runs)), shares, steps, seconds)
    Console().print(table)


if __name__ == "__main__":
    run_program("benchmarks.objective", main)
