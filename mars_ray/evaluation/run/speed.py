"""Measure how many tokens a second each setting gives on this machine, on the same prompts and in turns."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from statistics import fmean, stdev

import torch

from mars_ray.adapter.card import unnamed
from mars_ray.adapter.folder import Adapter
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import decode_all
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import Request, SamplingParams
from mars_ray.errors import BadRecordError, DataError, RequestError
from mars_ray.evaluation.results import SettingSpeed, SpeedMeasurement
from mars_ray.evaluation.settings import DecodingSetting
from mars_ray.evaluation.tasks.registry import Question, Task
from mars_ray.measure import Sample, interleaved, machine
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.progress import ProgressLine

PROMPTS = 64
ROUNDS = 3
"""Rounds that are measured, behind one that warms up."""

TimedPrompt = tuple[tuple[int, ...], SamplingParams]


def measure_speed(
    checkpoint: Checkpoint,
    tasks: Sequence[Task],
    settings: Sequence[DecodingSetting],
    sampling: Callable[[Task, Question], SamplingParams],
    *,
    options: EngineOptions,
    adapter: Adapter | None,
) -> SpeedMeasurement:
    """Answer the same prompts at every setting, round by round, with as many masks as the engine finds worth feeding.

    Raises `DataError` when the model takes none.
    """
    limit = max(task.max_tokens for task in tasks)
    engine = Engine(checkpoint, replace(options, max_request_tokens=limit), adapters=unnamed(adapter))
    try:
        prompts = _prompts(engine, ChatEncoder(checkpoint.tokenizer), tasks, sampling)
        if options.compiled:
            engine.wait_until_compiled()
        candidates = {each.name: partial(sample_speed, engine, prompts, each) for each in settings}
        with ProgressLine("measure speed", total=len(settings) * (ROUNDS + 1)) as progress:
            samples = interleaved(candidates, ROUNDS, progress)
    finally:
        engine.close()
    rates = {name: tuple(sample.tokens_per_s for sample in of_setting) for name, of_setting in samples.items()}
    return SpeedMeasurement(
        prompts=len(prompts),
        machine=machine(),
        rows=engine.limits.max_num_seqs,
        device=checkpoint.network.device.type,
        threads=torch.get_num_threads(),
        settings={
            name: SettingSpeed(tokens_per_s=fmean(rounds), tokens_per_s_std=stdev(rounds), rounds=rounds)
            for name, rounds in rates.items()
        },
    )


def _prompts(
    engine: Engine,
    encoder: ChatEncoder,
    tasks: Sequence[Task],
    sampling: Callable[[Task, Question], SamplingParams],
) -> list[TimedPrompt]:
    """Take the first of every task, then the second, and so on."""
    in_turns = chain.from_iterable(zip_longest(*([(task, each) for each in task.questions] for task in tasks)))
    found: list[TimedPrompt] = []
    for task, question in (pair for pair in in_turns if pair is not None):
        try:
            # Requests that fix their seed fix how far is looked ahead.
            prompt, params = tuple(encoder.prompt(question.messages)), replace(sampling(task, question), seed=None)
            engine.limits.check(Request(id=question.name, prompt=prompt, sampling=params))
        except (BadRecordError, RequestError):
            continue  # the job has it among its errors
        found.append((prompt, params))
        if len(found) == PROMPTS:
            break
    if not found:
        raise DataError("the model takes none of the prompts; see errors.jsonl of the answers.")
    return found


def sample_speed(engine: Engine, prompts: Sequence[TimedPrompt], setting: DecodingSetting) -> Sample:
    """Answer prompts at a setting, as many at a time as the engine has rows, with nothing left of earlier ones."""
    engine.clear_cache()
    tokens = forwards = 0
    started_s = time.perf_counter()
    requests = (
        Request(id=str(number), prompt=prompt, sampling=sampling, decode=setting.decode)
        for number, (prompt, sampling) in enumerate(prompts)
    )
    for decoded in decode_all(engine, requests):
        tokens, forwards = tokens + len(decoded.tokens), forwards + decoded.forwards
    return Sample(tokens=tokens, seconds=time.perf_counter() - started_s, forwards=forwards)
