"""Time one decoding forward of our torch runner by rows and positions: eager, as a CUDA graph, and against the GPU.

    python -m benchmarks.gpu.curve --json curve.jsonl

Networks have random weights. Each row is a sequence with `CACHED` tokens and its positions of one step. The first line
has the ceilings: bytes per second of a large copy, read and written, and the rate of a large matrix product.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from benchmarks.gpu.lines import append
from benchmarks.gpu.settings import SHAPES
from mars_ray.engine.execution.torch_runner import TorchRunner
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.kv.forward_batch import ForwardBatch, SlotSpan
from mars_ray.program import run_program

ROWS, POSITIONS = (1, 8, 32), (1, 4, 8, 15)
CACHED = 256
CEILING_BYTES, CEILING_SIDE = 1 << 31, 8192
SECONDS = 0.3
"""Time spent on each figure, at most."""


def network_of(shape: str, device: str) -> PreTrainedModel:
    """Return a bfloat16 network of random weights on `device`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            network: PreTrainedModel = AutoModelForCausalLM.from_config(
                Qwen2Config(**SHAPES[shape], max_position_embeddings=4096), trust_remote_code=False
            ).eval()
    finally:
        torch.set_default_dtype(before)
    return network


def batch_of(rows: int, positions: int, vocab_size: int, device: str) -> ForwardBatch:
    """Return the inputs of a step in which each of `rows` sequences has `positions` tokens or drafts."""
    count = rows * positions
    number_N = torch.arange(count, device=device)
    position_N = number_N % positions + CACHED
    none_N = torch.full_like(number_N, -1)
    return ForwardBatch(
        id_N=torch.randint(vocab_size, (count,), device=device),
        slot_N=number_N // positions,
        position_N=position_N,
        target_N=position_N.clone(),
        prefix_N=position_N + 1,
        behind_N=torch.zeros_like(number_N),
        offset_N=none_N,
        adapter_N=none_N.clone(),
        pick_M=number_N.clone(),
        spans=[SlotSpan(slot, positions, CACHED + positions) for slot in range(rows)],
        kv_tokens=rows * CACHED,
    )


def median_ms(work: Callable[[], object], device: str) -> float:
    """Return the median time of `work` in milliseconds, by the clock of the device."""

    def once() -> float:
        if device == "cpu":
            begun_s = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - begun_s)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    for _ in range(2):
        once()
    times, end_s = [once() for _ in range(3)], time.perf_counter() + SECONDS
    while time.perf_counter() < end_s and len(times) < 100:
        times.append(once())
    return median(times)


def graph_of(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Return `work` as a CUDA graph, and what it returns in the graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def ceilings() -> dict[str, float]:
    """Return the rates that the GPU reaches: copied bytes, counted when read and when written, and bf16 products."""
    source = torch.randint(0, 255, (CEILING_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = median_ms(lambda: target.copy_(source), "cuda")
    matrix = torch.randn(CEILING_SIDE, CEILING_SIDE, device="cuda", dtype=torch.bfloat16)
    product_ms = median_ms(lambda: matrix @ matrix, "cuda")
    return {"copy_gb_per_s": 2 * CEILING_BYTES / copy_ms / 1e6, "bf16_tflops": 2 * CEILING_SIDE**3 / product_ms / 1e9}


@torch.inference_mode()
def measure(shape: str, device: str, file: Path) -> None:
    """Append the figures of one shape."""
    network = network_of(shape, device)
    weights_gb = sum(parameter.nbytes for parameter in network.parameters()) / 1e9
    cache = SlotKVCache(network.config, torch.bfloat16, torch.device(device))
    cache.resize(max(ROWS), CACHED + max(POSITIONS))
    for keys, values in cache.layers:
        keys.normal_()
        values.normal_()
    runner = TorchRunner(network, cache, mask_id=network.config.vocab_size - 1)
    for rows in ROWS:
        for positions in POSITIONS:
            batch = batch_of(rows, positions, network.config.vocab_size, device)
            line: dict[str, Any] = {"shape": shape, "rows": rows, "positions": positions, "weights_gb": weights_gb}

            def step(batch: ForwardBatch = batch) -> Any:
                return runner.forward(batch)

            try:
                line["eager_ms"] = median_ms(step, device)
                if device == "cuda":
                    expected_M = step()[0]
                    graph, (token_M, *_) = graph_of(step)
                    graph.replay()
                    torch.cuda.synchronize()
                    line["graph_ms"] = median_ms(graph.replay, device)
                    line["graph_equal"] = bool((token_M == expected_M).all())
                    line["read_gb_per_s"] = weights_gb * 1e3 / line["graph_ms"]
                    del graph, token_M
            except (RuntimeError, torch.OutOfMemoryError) as error:  # the other sizes may still run
                line["error"] = f"{type(error).__name__}: {error}"[:300]
            append(file, line)


def main() -> None:
    """Measure the shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=["qwen2.5-0.5b", "qwen2.5-7b"])
    parser.add_argument("--json", type=Path, required=True, help="file of JSON lines to append to")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.device == "cuda":
        append(arguments.json, {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **ceilings()})
    for shape in arguments.shapes:
        measure(shape, arguments.device, arguments.json)
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    run_program("benchmarks.gpu.curve", main)
