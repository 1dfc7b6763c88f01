"""`mars-ray bench floor`: what a step must at least move and do, and what ours takes."""

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mars_ray.bench.decode.contenders import subject
from mars_ray.bench.decode.floor import step_floor
from mars_ray.bench.machine import machine
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import ConfigError
from mars_ray.model.dtype import DtypeOrAuto

CONTEXT = 256
"""Cached tokens of every row when the steps are timed."""
STEPS = 20
BLOCK = 8


def bench_floor(name: str, batches: Sequence[int], dtype: DtypeOrAuto) -> dict[str, Any]:
    """Measure and print; returns what is printed, ready for JSON."""
    if min(batches, default=0) < 1:
        raise ConfigError(f"batch is {min(batches, default=0)}; it must be at least 1.")
    torch.set_num_threads(1)
    on = subject(name, 1, dtype)
    network = on.checkpoint.network
    # The floor is that of the plain network: the engine gets the copy.
    floors = {
        (batch, block): step_floor(network, rows=batch, positions=2 * block - 1, context=CONTEXT)
        for batch in batches
        for block in (1, BLOCK)
    }
    engine = Engine(replace(on.checkpoint), EngineOptions(max_num_seqs=max(batches)))
    engine.wait_until_compiled()
    rows = []
    table = Table(
        title=f"{name}, {on.dtype.name}: a step of the engine and its floor, {CONTEXT} tokens cached, one thread, in ms"
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
    of_run = {"model": name, "dtype": on.dtype.name, "dtype_reason": on.dtype.reason, "threads": 1, "context": CONTEXT}
    return {"machine": machine(), **of_run, "steps": rows}


def _step_seconds(engine: Engine, batch: int, block: int) -> float:
    """Return the median time of a step in which each row feeds the tokens of a whole block and its masks."""
    engine.clear_cache()
    decode = DecodeParams(mode=Mode.AR) if block == 1 else DecodeParams(threshold=0.0, block=block)
    sampling = SamplingParams(max_tokens=(STEPS + 4) * block, ignore_eos=True)
    for number in range(batch):
        prompt = tuple((7 * number + place) % 900 + 20 for place in range(CONTEXT - STEPS * block // 2))
        engine.add(Request(id=str(number), prompt=prompt, sampling=sampling, decode=decode))
    while engine.waiting:
        engine.step()
    seconds = []
    for _ in range(STEPS):
        started_s = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - started_s)
    for number in range(batch):
        engine.cancel(str(number))
    engine.step()
    return median(seconds)
