"""Compare the tokens per second and the memory of a training step with plain transformers.

    python -m benchmarks.training --model smollm2 --precision bfloat16 --json training.json

Packed sequences hold random tokens in examples as long as those of instruction data (mean 146 tokens, 44 % of them
responses). Contenders take turns, each in its own process, so that the memory settings of one do not affect another.
`transformers ar` is the usual loop: accelerate, the network's own loss over whole sequences, AdamW. `dense mars` is our
objective with one mask over whole sequences, as on a GPU. `mars checkpointing` is `mars` with activation checkpointing.
`adapter` trains a gated LoRA of rank 32 instead of the model, `dense adapter` the same with one mask over whole
sequences.

Memory is the peak of one more step: weights, AdamW's moments, and all that torch allocates during the step, as
`torch.cuda.max_memory_allocated` counts it on a GPU. The peak of the whole process is measured too.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.report import write_report
from mars_ray.adapter.gated_lora import new_adapter
from mars_ray.adapter.loss import AdapterLoss
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.method import tiles
from mars_ray.method.loss import StreamLoss
from mars_ray.method.streams import IGNORE, PADDING, PackedRows, clean_stream, mars_streams, random_phases
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.training.step import keep_freed_memory, train_step

WAYS = ("transformers ar", "ar", "dense mars", "mars", "mars checkpointing", "adapter", "dense adapter")
FIGURES = ("tokens_per_s", "peak_mib", "process_peak_mib")
BLOCK = 8
EXAMPLE_TOKENS = 146
RESPONSE_SHARE = 0.44


def rows(step: int, count: int, length: int, vocabulary: int) -> PackedRows:
    """Return packed sequences of random tokens without padding; the last example of each is cut off."""
    generator = torch.Generator().manual_seed(step)
    example = torch.zeros(count, length, dtype=torch.long)
    position = torch.zeros(count, length, dtype=torch.long)
    response = torch.zeros(count, length, dtype=torch.bool)
    for r in range(count):
        start = number = 0
        while start < length:
            tokens = max(8, int(EXAMPLE_TOKENS * math.exp(0.7 * torch.randn((), generator=generator) - 0.25)))
            end = min(start + tokens, length)
            example[r, start:end] = number
            position[r, start:end] = torch.arange(end - start)
            response[r, start + round((end - start) * (1 - RESPONSE_SHARE)) : end] = True
            start = end
            number += 1
    tokens_RT = torch.randint(vocabulary, (count, length), generator=generator)
    return PackedRows(tokens_RT=tokens_RT, response_RT=response, example_RT=example, position_RT=position)


def allocated_peak(work: Callable[[], object]) -> int:
    """Return the most bytes of CPU memory that torch held at once of those it allocated during a call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    return max(int(event["args"]["Total Allocated"]) for event in events if event["name"] == "[memory]")


def train(way: str, model: str, precision: str, steps: int, count: int, length: int) -> dict[str, list[float]]:
    """Return the tokens per second of each step after the first, and the peak memory in MiB, in this process."""
    of_adapter = way in ("adapter", "dense adapter")
    dtype = torch.bfloat16 if of_adapter and precision == "bfloat16" else torch.float32
    checkpoint = load_checkpoint(resolve_model(model), dtype=dtype)
    network = checkpoint.network
    if way == "mars checkpointing":
        network.activation_checkpointing_enable({"use_reentrant": False})
    if way not in ("transformers ar", "dense mars", "dense adapter"):
        network.set_attn_implementation(tiles.ATTENTION)
        keep_freed_memory()
    trained: nn.Module = network if way == "transformers ar" else StreamLoss(network)
    if of_adapter:
        trained = AdapterLoss(network, new_adapter(network, rank=32, alpha=64, masks=BLOCK, names=None), distill=1.0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if precision == "bfloat16" else "no")
    adamw = torch.optim.AdamW(trained.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
    wrapped, optimizer = accelerator.prepare(trained, adamw)
    network.train()

    def plain(packed: PackedRows) -> None:
        labels = packed.tokens_RT.masked_fill(~packed.response_RT, IGNORE)
        loss = wrapped(input_ids=packed.tokens_RT, position_ids=packed.position_RT, labels=labels).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def ours(packed: PackedRows) -> None:
        phase_RT = random_phases(packed, BLOCK, torch.Generator().manual_seed(0))
        if way == "ar":
            streams = clean_stream(packed)
        elif of_adapter:
            streams = mask_streams(packed, masks=BLOCK, phase_RT=phase_RT)
        else:
            streams = mars_streams(packed, block=BLOCK, mask_id=checkpoint.mask_id, phase_RT=phase_RT)
        train_step(wrapped, optimizer, [streams], accelerator, ar_weight=1.0, clip_norm=1.0)

    step: Callable[[PackedRows], None] = plain if way == "transformers ar" else ours
    seconds = []
    for number in range(steps + 1):
        packed = rows(number, count, length, checkpoint.mask_id)
        assert bool((packed.example_RT != PADDING).all())
        started = time.perf_counter()
        step(packed)
        seconds.append(time.perf_counter() - started)
    process_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    moments = [moment for state in adamw.state.values() for moment in state.values()]
    held = sum(tensor.nbytes for tensor in (*trained.parameters(), *moments))
    peak = held + allocated_peak(lambda: step(rows(steps + 1, count, length, checkpoint.mask_id)))
    return {
        "tokens_per_s": [count * length / step_s for step_s in seconds[1:]],
        "peak_mib": [peak / 2**20],
        "process_peak_mib": [process_kib / 2**10],
    }


def table_of(figures: dict[str, dict[str, list[float]]], title: str) -> Table:
    """Return a table with the medians of the figures of each way, and the range of its speed."""
    table = Table("way", "tokens/s", "slowest and fastest step", "peak MiB", "peak of the process", title=title)
    for way, rates in figures["tokens_per_s"].items():
        peaks = (f"{median(figures[name][way]):,.0f}" for name in ("peak_mib", "process_peak_mib"))
        table.add_row(way, f"{median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}", *peaks)
    return table


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description="Compare tokens per second of a training step.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=WAYS, help="train one way in this process and print its figures")
    arguments = parser.parse_args()
    if arguments.only:
        torch.set_num_threads(arguments.threads)
        print(
            json.dumps(
                train(
                    arguments.only,
                    arguments.model,
                    arguments.precision,
                    arguments.steps,
                    arguments.rows,
                    arguments.length,
                )
            )
        )
        return
    resolve_model(arguments.model)  # so that a wrong name ends the program here
    figures: dict[str, dict[str, list[float]]] = {name: {way: [] for way in arguments.ways} for name in FIGURES}
    for _ in range(arguments.rounds):
        for way in arguments.ways:
            command = [sys.executable, "-m", "benchmarks.training", *sys.argv[1:], "--only", way]
            process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            way_figures = json.loads(process.stdout.splitlines()[-1])
            for name in FIGURES:
                figures[name][way] += way_figures[name]
    Console().print(table_of(figures, f"{arguments.model}, {arguments.precision}"))
    settings = {name: value for name, value in vars(arguments).items() if name not in ("ways", "json", "only")}
    write_report(arguments.json, {**settings, **figures})


if __name__ == "__main__":
    run_program("benchmarks.training", main)
