"""Measure the cost of an adapter in a step: the same masks with its low-rank products and without.

    python -m benchmarks.adapter_cost --ranks 32,64 --batch 1,16 --json cost.json

The engine decodes in exact mode with random low-rank weights; it is told that they are as sure of their drafts, and
right as often, as a trained adapter is (`--right`), so it lays out the masks that it would lay out for one. The
forwards of its last steps are then run again, in turns, with the adapter and with the same masks as plain tokens. What
is added is compared with a whole step, that is the forward without adapter and all that the engine does beside it.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from mars_ray.adapter.card import AdapterCard
from mars_ray.adapter.folder import Adapter
from mars_ray.adapter.gated_lora import GatedLoRA, LoraShape, linears_of
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.execution.model_runner import ForwardOutput
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions, Quantize
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.measure import machine
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.dtype import resolve_dtype
from mars_ray.model.resolve import pin, resolve_model
from mars_ray.program import run_program

STEPS, KEPT, ROUNDS = 96, 12, 9
LEARNED = 1 << 14
"""Forwards added to the profile, far more than those of the random weights."""
BLOCK = 8


def random_adapter(checkpoint: Checkpoint, rank: int) -> Adapter:
    """Return an adapter for all linear layers."""
    network: Any = checkpoint.network
    shape = LoraShape(rank=rank, alpha=2.0 * rank, masks=BLOCK - 1, linears=linears_of(network, None))
    lora = GatedLoRA(shape, network.config.hidden_size)
    for parameter in lora.parameters():
        nn.init.normal_(parameter, std=0.02)
    nothing: dict[str, Any] = {"objective": {}, "versions": {}, "losses": {}, "base_model": "", "base_digest": ""}
    card = AdapterCard(block=BLOCK, data="", examples=0, tokens=0, steps=0, seed=0, **nothing)
    return Adapter(lora.requires_grad_(False).eval(), card)


def teach(engine: Engine, right: Sequence[float]) -> None:
    """Set in the profile the share of forwards in which the k-th draft is right; all masks give drafts."""
    sure = chances(right)
    for number in range(LEARNED):
        draw = (number * 0.6180339887) % 1
        engine.profile.observe_masks(len(sure), sure, 0.0)
        engine.profile.observe_drafts(sure, sum(draw < share for share in right))
    engine.profile.points()


def chances(right: Sequence[float]) -> list[float]:
    """Return the probability of each draft to be right if those before it are."""
    return [now / before for before, now in pairwise([1.0, *right])]


def recorded(
    engine: Engine, prompts: Sequence[tuple[int, ...]], callers: int, sure: Sequence[float]
) -> tuple[list[ForwardBatch], list[float]]:
    """Return the last decoding forwards of the engine with `callers` requests, and the rest of their step times."""
    forwards: list[ForwardBatch] = []
    seconds = 0.0
    run = engine._runner.run

    def spied(batch: ForwardBatch) -> ForwardOutput:
        nonlocal seconds
        started_s = time.perf_counter()
        output = run(batch)
        seconds = time.perf_counter() - started_s
        offsets = batch.offset_N[batch.pick_M].tolist()
        output.confidences = [
            sure[offset] if offset >= 0 else each for offset, each in zip(offsets, output.confidences, strict=True)
        ]
        forwards.append(batch)
        return output

    decode = DecodeParams(mode=Mode.EXACT)
    for number, prompt in enumerate(prompts[:callers]):
        sampling = SamplingParams(max_tokens=4 * STEPS, ignore_eos=True)
        engine.add(Request(id=str(number), prompt=prompt, sampling=sampling, decode=decode))
    beside = []
    engine._runner.run = spied  # type: ignore[method-assign]
    for _ in range(STEPS):
        started_s = time.perf_counter()
        engine.step()
        beside.append(time.perf_counter() - started_s - seconds)
    engine._runner.run = run  # type: ignore[method-assign]
    return forwards[-KEPT:], beside[-KEPT:]


def measure(engine: Engine, forwards: Sequence[ForwardBatch], beside: Sequence[float]) -> dict[str, Any]:
    """Run forwards with and without the adapter in turns; return the time it adds to a step."""
    pairs = [(each, replace(each, adapter_N=torch.full_like(each.adapter_N, -1))) for each in forwards]
    times: dict[bool, list[list[float]]] = {True: [], False: []}
    for _ in range(ROUNDS):
        for adapted in (True, False):
            round_s = []
            for with_adapter, without in pairs:
                started_s = time.perf_counter()
                engine._runner.run(with_adapter if adapted else without)
                round_s.append(time.perf_counter() - started_s)
            times[adapted].append(round_s)
    # Other processes make a forward longer, never shorter, so the minimum is taken.
    with_s, without_s = (sum(map(min, zip(*times[adapted], strict=True))) / len(pairs) for adapted in (True, False))
    step_s = without_s + median(beside)
    return {
        "positions": sum(len(each.id_N) for each in forwards) / len(forwards),
        "masks": sum(int((each.offset_N >= 0).sum()) for each in forwards) / len(forwards),
        "block": engine._blocks.chosen,
        "forward_ms": 1e3 * without_s,
        "with_adapter_ms": 1e3 * with_s,
        "step_ms": 1e3 * step_s,
        "added_to_step": (with_s - without_s) / step_s,
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="What an adapter adds to a step.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ranks", default="32,64")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--right", default="0.5,0.3,0.2,0.12,0.08,0.05,0.03", help="share of forwards, by mask")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = resolve_model(given.model)
    dtype = resolve_dtype("auto", folder, "cpu")
    quantize: Quantize | None = given.quantize
    encoder = ChatEncoder(load_checkpoint(folder).tokenizer)
    prompts = [tuple(encoder.prompt([{"role": "user", "content": f"Tell me of the number {n}."}])) for n in range(64)]
    right = [float(each) for each in given.right.split(",")]
    rows = []
    for rank in map(int, given.ranks.split(",")):
        for batch in map(int, given.batch.split(",")):
            checkpoint = load_checkpoint(folder, dtype=getattr(torch, dtype.name))
            options = EngineOptions(max_num_seqs=batch, compiled=False, quantize=quantize)
            engine = Engine(checkpoint, options, adapters={None: random_adapter(checkpoint, rank)}, consume=True)
            teach(engine, right)
            row = {"rank": rank, "batch": batch} | measure(engine, *recorded(engine, prompts, batch, chances(right)))
            rows.append(row)
            print(json.dumps(row))
    command = f"benchmarks/adapter_cost.py --model {given.model} --ranks {given.ranks} --batch {given.batch}"
    command += f" --right {given.right}" + (f" --quantize {quantize}" if quantize else "")
    report = {"command": command, "machine": machine(), "model": pin(given.model, folder), "dtype": dtype.name}
    if given.json:
        given.json.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run_program("adapter_cost", main)
