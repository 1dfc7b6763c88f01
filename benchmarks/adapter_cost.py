"""Measure the cost of an adapter in a step: the same masks with and without its low-rank products.

    python -m benchmarks.adapter_cost --ranks 32,64 --batch 1,16 --json cost.json

The engine decodes in exact mode with random low-rank weights. Its profile is set to the confidence and accuracy of a
trained adapter (`--right`), so it feeds the masks that it would feed for a trained one. The forwards of its last steps
then run again, in turns, with the adapter and with the same masks as plain tokens. The added time is compared with a
whole step: the forward without the adapter, and the engine's work outside the forward.
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
from mars_ray.method.drafts import PositionPrice
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import pin, resolve_model
from mars_ray.program import run_program

STEPS = 96
TIMED_STEPS = 12
ROUNDS = 9
LEARNED = 1 << 14
"""Forwards added to the profile, far more than the random weights contribute."""
BLOCK = 8


def random_adapter(checkpoint: Checkpoint, rank: int) -> Adapter:
    """Return an adapter with random weights for all linear layers."""
    network: Any = checkpoint.network
    shape = LoraShape(rank=rank, alpha=2.0 * rank, masks=BLOCK - 1, linears=linears_of(network, None))
    lora = GatedLoRA(shape, network.config.hidden_size)
    for parameter in lora.parameters():
        nn.init.normal_(parameter, std=0.02)
    nothing: dict[str, Any] = {"objective": {}, "versions": {}, "losses": {}}
    unknown = dict.fromkeys(("base_model", "base_digest", "base_vocabulary", "data"), "")
    card = AdapterCard(block=BLOCK, examples=0, tokens=0, steps=0, seed=0, **nothing, **unknown)
    return Adapter(lora.requires_grad_(False).eval(), card)


def teach(engine: Engine, right_shares: Sequence[float]) -> None:
    """Fill the profile: `right_shares` holds the share of forwards in which the k-th draft is right."""
    chances = conditional_chances(right_shares)
    for number in range(LEARNED):
        draw = (number * 0.6180339887) % 1
        engine.profile.observe_masks(len(chances), chances, PositionPrice(0.0))
        right = sum(draw < share for share in right_shares)
        engine.profile.observe_drafts(chances, [1.0] * right + [0.0] * (right < len(chances)))
    engine.profile.points()


def conditional_chances(right_shares: Sequence[float]) -> list[float]:
    """Return the probability that each draft is right if all drafts before it are right."""
    return [now / before for before, now in pairwise([1.0, *right_shares])]


def record_forwards(
    engine: Engine, prompts: Sequence[tuple[int, ...]], callers: int, chances: Sequence[float]
) -> tuple[list[ForwardBatch], list[float]]:
    """Decode `callers` requests; return the last forwards, and the seconds their steps spent outside the forward."""
    forwards: list[ForwardBatch] = []
    seconds = 0.0
    run = engine._forwards.runner.run

    def record_forward(batch: ForwardBatch) -> ForwardOutput:
        nonlocal seconds
        started_s = time.perf_counter()
        output = run(batch)
        seconds = time.perf_counter() - started_s
        offsets = batch.offset_N[batch.pick_M].tolist()
        output.confidences = [
            chances[offset] if offset >= 0 else confidence
            for offset, confidence in zip(offsets, output.confidences, strict=True)
        ]
        forwards.append(batch)
        return output

    decode = DecodeParams(mode=Mode.EXACT)
    for number, prompt in enumerate(prompts[:callers]):
        sampling = SamplingParams(max_tokens=4 * STEPS, ignore_eos=True)
        engine.add(Request(id=str(number), prompt=prompt, sampling=sampling, decode=decode))
    overheads_s = []
    engine._forwards.runner.run = record_forward  # type: ignore[method-assign]
    for _ in range(STEPS):
        started_s = time.perf_counter()
        engine.step()
        overheads_s.append(time.perf_counter() - started_s - seconds)
    engine._forwards.runner.run = run  # type: ignore[method-assign]
    return forwards[-TIMED_STEPS:], overheads_s[-TIMED_STEPS:]


def measure(engine: Engine, forwards: Sequence[ForwardBatch], overheads_s: Sequence[float]) -> dict[str, Any]:
    """Run forwards with and without the adapter in turns; return the share of a step that the adapter adds."""
    pairs = [(batch, replace(batch, adapter_N=torch.full_like(batch.adapter_N, -1))) for batch in forwards]
    times: dict[bool, list[list[float]]] = {True: [], False: []}
    for _ in range(ROUNDS):
        for adapted in (True, False):
            round_s = []
            for with_adapter, without in pairs:
                started_s = time.perf_counter()
                engine._forwards.runner.run(with_adapter if adapted else without)
                round_s.append(time.perf_counter() - started_s)
            times[adapted].append(round_s)
    # Other processes only make a forward longer, so take the minimum.
    with_s, without_s = (sum(map(min, zip(*times[adapted], strict=True))) / len(pairs) for adapted in (True, False))
    step_s = without_s + median(overheads_s)
    return {
        "positions": sum(len(batch.id_N) for batch in forwards) / len(forwards),
        "masks": sum(int((batch.offset_N >= 0).sum()) for batch in forwards) / len(forwards),
        "block": engine._blocks.chosen,
        "forward_ms": 1e3 * without_s,
        "with_adapter_ms": 1e3 * with_s,
        "step_ms": 1e3 * step_s,
        "added_to_step": (with_s - without_s) / step_s,
    }


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description="Measure the cost of an adapter in a step.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ranks", default="32,64")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--right", default="0.5,0.3,0.2,0.12,0.08,0.05,0.03", help="share of forwards, by mask")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = resolve_model(arguments.model)
    dtype = check_folder(folder).dtype
    quantize: Quantize | None = arguments.quantize
    encoder = ChatEncoder(load_checkpoint(folder).tokenizer)
    prompts = [tuple(encoder.prompt([{"role": "user", "content": f"Tell me of the number {n}."}])) for n in range(64)]
    right_shares = [float(share) for share in arguments.right.split(",")]
    rows = []
    for rank in map(int, arguments.ranks.split(",")):
        for batch in map(int, arguments.batch.split(",")):
            checkpoint = load_checkpoint(folder, dtype=getattr(torch, dtype.name))
            options = EngineOptions(max_num_seqs=batch, quantize=quantize)
            engine = Engine(checkpoint, options, adapters={None: random_adapter(checkpoint, rank)}, consume=True)
            teach(engine, right_shares)
            row = {"rank": rank, "batch": batch} | measure(
                engine, *record_forwards(engine, prompts, batch, conditional_chances(right_shares))
            )
            rows.append(row)
            print(json.dumps(row))
    command = (
        f"benchmarks/adapter_cost.py --model {arguments.model} --ranks {arguments.ranks} --batch {arguments.batch}"
    )
    command += f" --right {arguments.right}" + (f" --quantize {quantize}" if quantize else "")
    report = {"command": command, "machine": machine(), "model": pin(arguments.model, folder), "dtype": dtype.name}
    if arguments.json:
        arguments.json.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    run_program("adapter_cost", main)
