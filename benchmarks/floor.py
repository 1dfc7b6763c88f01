"""Compare a step of the engine with its floor: the bytes it must move and the arithmetic it must do.

    python -m benchmarks.floor --model bundled --batch 1,4,16,32 --json floor.json

Activations, softmax, norms and Python are not counted. A real step has them, so it takes longer than the floor. The
limits are measured with torch's number of threads, on the device and in the dtype of the network.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from benchmarks.decode.contenders import subject
from benchmarks.report import write_report
from benchmarks.whole_numbers import whole_numbers
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.kv.cache import bytes_per_token, kv_shape
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import ConfigError
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.program import run_program

CONTEXT = 256
"""Cached tokens of every sequence when the steps are timed."""
STEPS = 20
BLOCK = 8
BEYOND_CACHE_BYTES = 2**30
"""Bytes of a buffer larger than the last-level cache of any processor measured so far."""
TRIES = 5
TRY_S_MIN = 0.02
"""Shortest time of a try, so that the clock and the first call do not matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNeeds:
    """Least bytes and operations of one step."""

    weight_bytes: int
    cache_read_bytes: int
    cache_written_bytes: int
    matrix_flops: int
    attention_flops: int

    @property
    def bytes(self) -> int:
        """Bytes that must be moved."""
        return self.weight_bytes + self.cache_read_bytes + self.cache_written_bytes

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return self.matrix_flops + self.attention_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """Best measured rates of the machine."""

    memory_bytes_per_s: float
    """Bytes per second from memory."""
    model_bytes_per_s: float
    """Bytes per second from a buffer of the network's size, which may fit into the processor's cache."""
    gemm_flops_per_s: float
    """Operations per second of products with the network's matrices, for the step's number of positions."""


@dataclass(frozen=True, slots=True)
class StepFloor:
    """The needs of a step and the limits it meets."""

    needs: StepNeeds
    limits: MachineLimits

    @property
    def memory_s(self) -> float:
        """Seconds to move all bytes at the faster of the two measured rates."""
        return self.needs.bytes / max(self.limits.model_bytes_per_s, self.limits.memory_bytes_per_s)

    @property
    def arithmetic_s(self) -> float:
        """Seconds to do the operations."""
        return self.needs.flops / self.limits.gemm_flops_per_s

    @property
    def seconds(self) -> float:
        """The larger of the two times, because moving and computing may overlap."""
        return max(self.memory_s, self.arithmetic_s)


def step_floor(network: PreTrainedModel, *, rows: int, positions: int, context: int) -> StepFloor:
    """Return the floor of a step of `rows` sequences, each with `positions` positions after `context` cached tokens."""
    needs = step_needs(network, rows=rows, positions=positions, context=context)
    return StepFloor(needs, measure_limits(network, rows * positions))


def step_needs(network: PreTrainedModel, *, rows: int, positions: int, context: int) -> StepNeeds:
    """Count bytes and operations; attention is causal, and each query reads the whole context."""
    config = network.config
    itemsize = network.dtype.itemsize
    _, _, head_size = kv_shape(config)
    cache_token_bytes = bytes_per_token(config, network.dtype)
    # Query q of a window, counted from 0, sees the context and q + 1 positions of the window.
    pairs = rows * (positions * context + positions * (positions + 1) // 2)
    # A lookup reads one row of the embedding, but a tied table is also the output matrix and is read in full.
    table = network.get_input_embeddings().weight
    tied = network.get_output_embeddings().weight is table
    parameters = network.num_parameters() - (0 if tied else table.numel())
    return StepNeeds(
        weight_bytes=parameters * itemsize,
        cache_read_bytes=rows * context * cache_token_bytes,
        cache_written_bytes=rows * positions * cache_token_bytes,
        matrix_flops=2 * sum(matrix.weight.numel() for matrix in _matrices(network)) * rows * positions,
        # Scores and weighted values: 2 x head_size operations each, per head and pair.
        attention_flops=4 * config.num_hidden_layers * config.num_attention_heads * head_size * pairs,
    )


def measure_limits(
    network: PreTrainedModel, positions: int, clock: Callable[[], float] = time.perf_counter
) -> MachineLimits:
    """Measure the rates of this machine for a network, with `positions` positions in a step."""
    device = network.device
    model_bytes = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    return MachineLimits(
        memory_bytes_per_s=_read_rate(max(BEYOND_CACHE_BYTES, model_bytes), device, clock),
        model_bytes_per_s=_read_rate(model_bytes, device, clock),
        gemm_flops_per_s=_gemm_rate(network, positions, clock),
    )


def _matrices(network: PreTrainedModel) -> list[nn.Linear]:
    return [module for module in network.modules() if isinstance(module, nn.Linear)]


def _read_rate(size_bytes: int, device: torch.device, clock: Callable[[], float]) -> float:
    """Return the bytes per second of summing or copying a buffer, whichever is faster."""
    buffer = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
    read_rate = buffer.nbytes / _best_seconds(buffer.sum, device, clock)
    half = buffer.numel() // 2
    copied_s = _best_seconds(lambda: buffer[:half].copy_(buffer[half : 2 * half]), device, clock)
    return max(read_rate, buffer.nbytes / copied_s)


@torch.inference_mode()
def _gemm_rate(network: PreTrainedModel, positions: int, clock: Callable[[], float]) -> float:
    """Return operations per second over all matrices: each shape is timed alone and weighted by its count."""
    shapes = Counter(tuple(matrix.weight.shape) for matrix in _matrices(network))
    one_of = {tuple(matrix.weight.shape): matrix.weight for matrix in _matrices(network)}
    flops = 0
    seconds = 0.0
    for shape, count in shapes.items():
        weight = one_of[shape]
        x_PI = torch.ones(positions, shape[1], dtype=weight.dtype, device=weight.device)
        flops += count * 2 * positions * weight.numel()
        seconds += count * _best_seconds(partial(functional.linear, x_PI, weight), weight.device, clock)
    return flops / seconds


def _best_seconds(work: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> float:
    """Return the shortest mean time of a call over a few tries."""
    calls = 1
    best = float("inf")
    for _ in range(TRIES + 1):
        started_s = clock()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken_s = (clock() - started_s) / calls
        best = min(best, taken_s)
        calls = max(1, round(TRY_S_MIN / taken_s))
    return best


def bench_floor(name: str, batches: Sequence[int], dtype: DtypeOrAuto) -> dict[str, Any]:
    """Measure, print, and return the figures."""
    if min(batches, default=0) < 1:
        raise ConfigError(f"batch is {min(batches, default=0)}; it must be at least 1.")
    torch.set_num_threads(1)
    case = subject(name, 1, dtype)
    network = case.checkpoint.network
    # The floor is measured on the plain network, before the engine replaces its attention.
    floors = {
        (batch, block): step_floor(network, rows=batch, positions=2 * block - 1, context=CONTEXT)
        for batch in batches
        for block in (1, BLOCK)
    }
    # All prompts fit into one step, so that no sequence is ahead of the others.
    options = EngineOptions(max_num_seqs=max(batches), max_prefill_tokens=max(batches) * CONTEXT)
    engine = Engine(replace(case.checkpoint), options)
    rows = []
    table = Table(
        title=f"{name}, {case.dtype.name}: engine step and its floor, {CONTEXT} tokens cached, one thread, in ms"
    )
    for column in ("rows", "positions a row", "memory", "arithmetic", "floor", "engine", "floor / engine"):
        table.add_column(column, justify="right")
    for (batch, block), floor in floors.items():
        seconds = _step_seconds(engine, batch, block)
        row = {
            "rows": batch,
            "positions_a_row": 2 * block - 1,
            "memory_ms": 1000 * floor.memory_s,
            "arithmetic_ms": 1000 * floor.arithmetic_s,
            "floor_ms": 1000 * floor.seconds,
            "engine_ms": 1000 * seconds,
            "share": floor.seconds / seconds,
        }
        rows.append(row)
        table.add_row(*(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)
    settings = {
        "model": name,
        "dtype": case.dtype.name,
        "dtype_reason": case.dtype.reason,
        "threads": 1,
        "context": CONTEXT,
    }
    return {**settings, "steps": rows}


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="a model, or a shape with random weights: shape:100m")
    parser.add_argument("--batch", default="1,4,16,32", help="sequences in a step")
    parser.add_argument("--dtype", choices=get_args(DtypeOrAuto), default="auto")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    write_report(options.json, bench_floor(options.model, whole_numbers(options.batch), options.dtype))


def _step_seconds(engine: Engine, batch: int, block: int) -> float:
    """Return the median time of a step in which each sequence feeds a whole block and its masks."""
    engine.clear_cache()
    decode = DecodeParams(mode=Mode.AR) if block == 1 else DecodeParams(threshold=0.0, block=block)
    sampling = SamplingParams(max_tokens=(STEPS + 4) * block, ignore_eos=True)
    for number in range(batch):
        prompt = tuple((7 * number + index) % 900 + 20 for index in range(CONTEXT - STEPS * block // 2))
        engine.add(Request(id=str(number), prompt=prompt, sampling=sampling, decode=decode))
    while engine.waiting:
        engine.step()
    seconds = []
    for _ in range(STEPS):
        started_s = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started_s)
    assert engine.running == batch, "an answer ended during the measurement"
    for number in range(batch):
        engine.cancel(str(number))
    engine.step()
    return median(seconds)


if __name__ == "__main__":
    run_program("benchmarks.floor", main)
