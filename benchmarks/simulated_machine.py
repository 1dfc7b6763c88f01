"""Measure this machine for `mars-ray simulate`, with the real engine.

    python -m benchmarks.simulated_machine --output machine.json

With one thread the clock is processor time, so that other programs do not change the figures.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from mars_ray.data.chat import ChatEncoder
from mars_ray.data.prompt_file import Conversation, read_prompts
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.engine.stats.grid import GRID
from mars_ray.engine.stats.profile import ProfilePoint
from mars_ray.engine.stats.step_time import StepTime
from mars_ray.errors import ModelError, RunError
from mars_ray.load.plan import Texts, bundled_prompts
from mars_ray.measure import machine
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.simulate.machine import Machine

MAX_TOKENS = 128
TIMED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
TIMED_BLOCKS = (1, 2, 4, 8, 16)
TIMED_WORDS = (16, 60, 150, 300, 600)
"""Lengths of the timed prompts, in words."""
ROUNDS = 2


def measure(model: str, threads: int) -> Machine:
    """Return the figures of this machine in a minute or two. Raises a `ModelError` for a model without calibration."""
    torch.set_num_threads(threads)
    checkpoint = load_checkpoint(resolve_model(model))
    if checkpoint.card is None or not checkpoint.card.calibration:
        raise ModelError(f"{model} has no calibrated card mars.json, which says how accurate each threshold is.")
    prompts = read_prompts(bundled_prompts())
    clock = time.thread_time if threads == 1 else time.perf_counter
    times, engine = _times(checkpoint, prompts, clock)
    points = [_point(checkpoint, prompts, threshold) for threshold in GRID]
    calibration = sorted(checkpoint.card.calibration, key=lambda point: -point.threshold)
    agreement = {point.threshold: point.agreement for point in calibration}
    return Machine(
        max_num_seqs=engine.limits.max_num_seqs,
        max_waiting_seqs=engine.limits.max_waiting_seqs,
        max_prefill_tokens=EngineOptions().max_prefill_tokens,
        max_model_len=engine.limits.max_model_len,
        step_time=times,
        # Calibration measures agreement on far more tokens than this run audits.
        profile=tuple(replace(point, agreement=agreement.get(point.threshold), audited=0.0) for point in points),
        accuracy=tuple((point.threshold, point.accuracy) for point in calibration if point.accuracy is not None),
        measured_on={"model": model, "threads": threads, "dtype": "float32", "clock": clock.__name__, **machine()},
    )


def _times(checkpoint: Checkpoint, prompts: list[Conversation], clock: Callable[[], float]) -> tuple[StepTime, Engine]:
    """Time steps with few and many sequences, short and long prompts, small and large blocks."""
    engine = Engine(checkpoint, EngineOptions(threshold=0.95), clock=clock)
    encoder = ChatEncoder(checkpoint.tokenizer)
    random_source = random.Random(0)
    texts = Texts(prompts, random_source)
    kinds = [
        (rows, block) for rows in TIMED_ROWS if rows <= engine.limits.max_num_seqs for block in TIMED_BLOCKS
    ] * ROUNDS
    random_source.shuffle(kinds)
    for number, (rows, block) in enumerate(kinds):
        requests = []
        for row in range(rows):
            text = texts.of(random_source.choice(TIMED_WORDS))
            requests.append(
                Request(
                    id=f"{number}-{row}",
                    prompt=tuple(encoder.prompt([{"role": "user", "content": text}])),
                    sampling=SamplingParams(max_tokens=random_source.randint(16, 64), temperature=0.0, ignore_eos=True),
                    decode=DecodeParams(block=block),
                )
            )
        _decode(engine, requests, gap=random_source.choice((0, 2, 8)))
    model = engine.step_time.model
    if model is None:
        raise RunError("Too few steps were measured; this is a bug.")
    return model, engine


def _point(checkpoint: Checkpoint, prompts: list[Conversation], threshold: float) -> ProfilePoint:
    """Decode all prompts at one threshold with the full block; return the profile point of the engine."""
    engine = Engine(checkpoint, EngineOptions(threshold=threshold))
    encoder = ChatEncoder(checkpoint.tokenizer)
    requests = [
        Request(
            id=str(number),
            prompt=tuple(encoder.prompt(list(conversation))),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
            decode=DecodeParams(block=engine.block),
        )
        for number, conversation in enumerate(prompts)
    ]
    _decode(engine, requests, gap=0)
    points = engine.profile.points()
    engine.close()
    return next(point for point in points if point.threshold == threshold)


def _decode(engine: Engine, requests: list[Request], gap: int) -> None:
    """Add a request every `gap` steps, and step until all have ended."""
    coming: Iterator[Request] = iter(requests)
    request = next(coming, None)
    steps = 0
    while request or engine.busy:
        while request and (not gap or steps % gap == 0 or not engine.busy):
            engine.add(request)
            request = next(coming, None)
            if gap:
                break
        engine.step()
        steps += 1


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description="Measure this machine for mars-ray simulate.")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    measured = measure(options.model, options.threads)
    options.output.write_text(measured.model_dump_json(indent=1) + "\n")
    print(measured.step_time)
    for point in measured.profile:
        print(point.threshold, round(point.tokens[-1], 3), point.agreement, round(point.audited))


if __name__ == "__main__":
    run_program("benchmarks.simulated_machine", main)
