"""Compare the tokens per second of a training step with plain transformers.

    python -m benchmarks.training --model smollm2 --precision bfloat16 --json training.json

Packed sequences hold random tokens in examples as long as those of instruction data (mean 146 tokens, 44 % of them
responses). Contenders take turns, each in its own process, so that the memory settings of one do not affect another.
`transformers ar` is the usual loop: accelerate, the network's own loss over whole sequences, AdamW. `dense mars` is our
objective with one mask over whole sequences. `adapter` trains a gated LoRA of rank 32 instead of the model.
"""

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import nn

from mars_ray.adapter.gated_lora import new_adapter
from mars_ray.adapter.loss import AdapterLoss
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.measure import machine
from mars_ray.method import tiles
from mars_ray.method.loss import StreamLoss
from mars_ray.method.streams import IGNORE, PADDING, PackedRows, clean_stream, mars_streams, random_phases
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.training.allocator import keep_freed_memory
from mars_ray.training.step import train_step

WAYS = ("transformers ar", "ar", "dense mars", "mars", "adapter")
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


def train(way: str, model: str, precision: str, steps: int, count: int, length: int) -> list[float]:
    """Return the seconds of each step after the first, in this process."""
    dtype = torch.bfloat16 if (way, precision) == ("adapter", "bfloat16") else torch.float32
    checkpoint = load_checkpoint(resolve_model(model), dtype=dtype)
    network = checkpoint.network
    if way in ("ar", "mars", "adapter"):
        network.set_attn_implementation(tiles.ATTENTION)
        keep_freed_memory()
    trained: nn.Module = network if way == "transformers ar" else StreamLoss(network)
    if way == "adapter":
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
        elif way == "adapter":
            streams = mask_streams(packed, block=BLOCK, phase_RT=phase_RT)
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
    return seconds[1:]


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
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=WAYS, help="train one way in this process and print its seconds")
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
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            command = [sys.executable, __file__, *sys.argv[1:], "--only", way]
            process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            seconds = json.loads(process.stdout.splitlines()[-1])
            rates[way] += [arguments.rows * arguments.length / step_s for step_s in seconds]
    table = Table(
        "way", "tokens/s, median", "slowest and fastest step", title=f"{arguments.model}, {arguments.precision}"
    )
    for way, way_rates in rates.items():
        table.add_row(way, f"{median(way_rates):,.0f}", f"{min(way_rates):,.0f} to {max(way_rates):,.0f}")
    Console().print(table)
    if arguments.json:
        settings = {name: value for name, value in vars(arguments).items() if name not in ("json", "only")}
        arguments.json.write_text(
            json.dumps({"machine": machine(), **settings, "tokens_per_s": rates}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
