"""Measure what `activation_checkpointing` saves and costs: a network of four layers trains on one sequence.

Memory is what the first step adds to the peak of the process. Time is the CPU time of the process, which depends less
on other work of the machine than the time on a clock.
"""

import argparse
import json
import multiprocessing
import resource
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import Qwen2Config, Qwen2ForCausalLM

from mars_ray.method import tiles
from mars_ray.method.loss import StreamLoss
from mars_ray.method.streams import PackedRows, mars_streams
from mars_ray.training.allocator import keep_freed_memory
from mars_ray.training.step import train_step

STEPS = 4


def main() -> None:
    """Measure a process without and one with activation checkpointing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    results: dict[str, dict[str, float]] = {}
    for name, checkpointing in {"kept": False, "computed again": True}.items():
        with processes.Pool(1) as pool:
            results[name] = pool.apply(measure, (arguments.positions, checkpointing))
        print(name, results[name], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def measure(positions: int, checkpointing: bool) -> dict[str, float]:
    """Train in this process; return the memory that the first step adds, in MB, CPU seconds per later step and the last
    loss."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    keep_freed_memory()
    network = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=2048,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
        )
    )
    network.set_attn_implementation(tiles.ATTENTION)
    if checkpointing:
        network.activation_checkpointing_enable({"use_reentrant": False})
    network.train()
    loss = StreamLoss(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    shape = (1, positions)
    rows = PackedRows(
        tokens_RT=torch.randint(2047, shape),
        response_RT=torch.ones(shape, dtype=torch.bool),
        example_RT=torch.zeros(shape, dtype=torch.long),
        position_RT=torch.arange(positions)[None],
    )
    streams = mars_streams(rows, block=4, mask_id=2047, phase_RT=0)
    accelerator = Accelerator(cpu=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    after, started_s = before, 0.0
    for step in range(1 + STEPS):
        losses = train_step(loss, optimizer, [streams], accelerator, ar_weight=1.0, clip_norm=1.0)
        if step == 0:
            after, started_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    seconds = (time.process_time() - started_s) / STEPS
    return {"step_mb": (after - before) / 1024, "cpu_s_per_step": seconds, "ar_loss": losses.ar_loss}


if __name__ == "__main__":
    main()
