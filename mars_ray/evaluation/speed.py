"""Measure the tokens per second of each setting on this machine, on the same prompts, with interleaved rounds.

The answers of the job cannot give speeds, because its settings share the engines.
"""

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
from mars_ray.evaluation.settings import AR, DecodingSetting
from mars_ray.evaluation.tasks import Question, Task
from mars_ray.measure import Sample, interleaved, machine
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.progress import ProgressLine

PROMPTS = 64
"""Largest number of prompts."""
PROMPTS_MIN = 2
ROUNDS = 3
"""Number of measured rounds, after one warm-up round."""
SECONDS = 300.0
"""Seconds that the measurement should take. A slow model answers fewer prompts, so that the evaluation does not take
longer for the speeds than for the answers."""

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
    """Return the speed of each setting on the same prompts. The engine chooses the number of masks per forward.

    Raises `DataError` if no prompt fits the model.
    """
    limit = max(task.max_tokens for task in tasks)
    engine = Engine(checkpoint, replace(options, max_request_tokens=limit), adapters=unnamed(adapter))
    try:
        fitting = _prompts(engine, ChatEncoder(checkpoint.tokenizer), tasks, sampling)
        turns = len(settings) * (ROUNDS + 1)
        prompts = as_many_as_fit(fitting, partial(sample_speed, engine, setting=AR), SECONDS / turns)
        candidates = {setting.name: partial(sample_speed, engine, prompts, setting) for setting in settings}
        with ProgressLine("measure speed", total=turns) as progress:
            samples = interleaved(candidates, ROUNDS, progress)
    finally:
        engine.close()
    rates = {name: tuple(sample.tokens_per_s for sample in rounds) for name, rounds in samples.items()}
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


def as_many_as_fit(
    prompts: Sequence[TimedPrompt], sample: Callable[[Sequence[TimedPrompt]], Sample], seconds: float
) -> Sequence[TimedPrompt]:
    """Return the first prompts that a sample answers in about `seconds` seconds, but at least two."""
    count = PROMPTS_MIN
    while count < len(prompts) and sample(prompts[:count]).seconds < seconds / 2:
        count *= 2
    return prompts[:count]


def _prompts(
    engine: Engine,
    encoder: ChatEncoder,
    tasks: Sequence[Task],
    sampling: Callable[[Task, Question], SamplingParams],
) -> list[TimedPrompt]:
    """Return the first prompt of every task, then the second, and so on, up to `PROMPTS`."""
    in_turns = chain.from_iterable(zip_longest(*([(task, question) for question in task.questions] for task in tasks)))
    prompts: list[TimedPrompt] = []
    for task, question in (pair for pair in in_turns if pair is not None):
        try:
            # Set no seed, because a seed would fix the number of masks.
            params = replace(sampling(task, question), seed=None)
            prompt = tuple(encoder.prompt(question.messages))
            engine.limits.check(Request(id=question.name, prompt=prompt, sampling=params))
        except (BadRecordError, RequestError):
            continue  # the job's errors file reports this question
        prompts.append((prompt, params))
        if len(prompts) == PROMPTS:
            break
    if not prompts:
        raise DataError("no prompt fits the model; see errors.jsonl in the folder of the answers.")
    return prompts


def sample_speed(engine: Engine, prompts: Sequence[TimedPrompt], setting: DecodingSetting) -> Sample:
    """Answer the prompts with one setting and an empty cache, and return the time, tokens and forwards."""
    engine.clear_cache()
    tokens = 0
    forwards = 0
    started_s = time.perf_counter()
    requests = (
        Request(id=str(number), prompt=prompt, sampling=sampling, decode=setting.decode)
        for number, (prompt, sampling) in enumerate(prompts)
    )
    for decoded in decode_all(engine, requests):
        tokens += len(decoded.tokens)
        forwards += decoded.forwards
    return Sample(tokens=tokens, seconds=time.perf_counter() - started_s, forwards=forwards)
