"""Measurements of the trained models: curves by threshold, the decoders of other papers, caches.

Every function returns JSON: rows by name, each with its figures. All decode greedily, on the same held-out prompts.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

import torch

from benchmarks.decode.contenders import contenders, subject
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.tasks import FAMILIES
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import decode_all
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.evaluation.calibration.counts import count_answers, is_right, total_of
from mars_ray.evaluation.calibration.prompts import CalibrationPrompt, family_prompts
from mars_ray.measure import Sample, interleaved, throughput
from mars_ray.method.metric import Metric
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.progress import ProgressLine
from pipelines.pipeline_files import Json
from pipelines.reproduction.baselines.autoregressive import decode_autoregressive
from pipelines.reproduction.baselines.block_diffusion import decode_block_diffusion
from pipelines.reproduction.baselines.jacobi import decode_jacobi
from pipelines.reproduction.baselines.medusa import MedusaHeads, decode_medusa
from pipelines.reproduction.baselines.output import BaselineOutput
from pipelines.reproduction.baselines.speculative import MaskWindow, decode_speculative
from pipelines.reproduction.recipes import Recipe
from pipelines.reproduction.training import HEADS_FILE, peak_memory

THRESHOLDS = (0.99, 0.98, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
ENTROPIES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.4)
"""Thresholds of entropy in nats."""
MAX_TOKENS = 96
SAMPLING = SamplingParams(max_tokens=MAX_TOKENS)
QUESTIONS_SEED = 100
"""Seed of the questions, the same for every seed of training."""
THRESHOLD = 0.95
DRAFTS = 4
"""Drafts per round of speculative decoding."""
BATCHES = (1, 4, 16)
ROUNDS = 3
"""Timed rounds, after one that warms up."""


def questions(per_family: int) -> list[CalibrationPrompt]:
    """Return held-out questions, the same number for each family."""
    return family_prompts(per_family, range(QUESTIONS_SEED, QUESTIONS_SEED + 1))


def curve(model: Path, per_family: int) -> Json:
    """Return one row for autoregressive decoding, and where the model has a block, one for each threshold."""
    checkpoint = load_checkpoint(model)
    decodes = {"ar": DecodeParams(mode=Mode.AR)}
    if checkpoint.card is not None and checkpoint.card.block is not None:
        decodes |= {f"{threshold:g}": DecodeParams(threshold=threshold) for threshold in THRESHOLDS}
    return _rows(checkpoint, decodes, questions(per_family))


def metrics(model: Path, per_family: int) -> Json:
    """Return one row for each metric and threshold; see `method.metric`."""
    decodes = {
        f"{metric.value} {threshold:g}": DecodeParams(threshold=threshold, metric=metric)
        for metric in Metric
        for threshold in (ENTROPIES if metric is Metric.ENTROPY else THRESHOLDS)
    }
    return _rows(load_checkpoint(model), decodes, questions(per_family))


def _rows(checkpoint: Checkpoint, decodes: Mapping[str, DecodeParams], asked: Sequence[CalibrationPrompt]) -> Json:
    counts = count_answers(checkpoint, asked, list(decodes.values()), SAMPLING)
    rows = {}
    for name, of_way in zip(decodes, counts, strict=True):
        total = total_of(of_way)
        rows[name] = figures(asked, [bool(each.right) for each in of_way]) | {
            "tokens": total.tokens,
            "tokens_per_forward": total.tokens_per_forward,
            "agreement": total.agreement,
        }
    return rows


def figures(asked: Sequence[CalibrationPrompt], right: Sequence[bool]) -> Json:
    """Return the accuracy, averaged over families, and the verdict on each question."""
    of_family: dict[str, list[bool]] = {name: [] for name in FAMILIES}
    for prompt, each in zip(asked, right, strict=True):
        assert prompt.example is not None  # they are of the families
        of_family[prompt.example.family].append(each)
    by_family = {name: fmean(each) for name, each in of_family.items()}
    return {
        "accuracy": fmean(by_family.values()),
        "by_family": by_family,
        "examples": len(asked),
        "right": "".join(str(int(each)) for each in right),
    }


def diffusion(model: Path, block: int, per_family: int) -> Json:
    """Return a row for each threshold, and one for a token a forward."""
    checkpoint = load_checkpoint(model)
    asked = questions(per_family)
    thresholds = {"one at a time": 1.0} | {f"{threshold:g}": threshold for threshold in THRESHOLDS}
    return {
        name: decoded(
            checkpoint,
            asked,
            partial(decode_block_diffusion, checkpoint.network, block=block, threshold=threshold),
        )
        for name, threshold in thresholds.items()
    }


def baselines(models: Mapping[str, Path], per_family: int) -> Json:
    """Return a row for each decoder, one prompt after the other, in turns, with the seconds of each round."""
    loaded = {name: load_checkpoint(path) for name, path in models.items() if name != "medusa"}
    networks = {name: each.network for name, each in loaded.items()}
    ar = networks["ar"]
    mars = networks["mars-4"]
    draft = networks["draft-ar"]
    draft_mars = networks["draft-mars-4"]
    window = MaskWindow(block=4, threshold=THRESHOLD)
    speculative = partial(decode_speculative, draft_length=DRAFTS)
    ways: dict[str, Callable[..., list[BaselineOutput]]] = {
        "AR": partial(decode_autoregressive, ar),
        "Jacobi": partial(decode_jacobi, ar, block=DRAFTS),
        "Medusa": partial(decode_medusa, ar, MedusaHeads.load(models["medusa"] / HEADS_FILE, ar)),
        "speculative, AR + AR": partial(speculative, ar, draft),
        "speculative, AR draft, MARS target": partial(speculative, mars, draft, target_window=window),
        "speculative, MARS both": partial(speculative, mars, draft_mars, target_window=window, draft_window=window),
        "engine, AR": by_engine(loaded["mars-8"], DecodeParams(mode=Mode.AR)),
        "engine, exact": by_engine(loaded["mars-8"], DecodeParams(mode=Mode.EXACT, threshold=THRESHOLD)),
        f"engine, threshold {THRESHOLD}": by_engine(loaded["mars-8"], DecodeParams(threshold=THRESHOLD)),
    }
    asked = questions(per_family)
    found = dict[str, Json]()

    def sample(name: str) -> Sample:
        found[name] = decoded(loaded["ar"], asked, ways[name])
        forwards = round(found[name]["tokens"] / found[name]["tokens_per_forward"])
        return Sample(tokens=found[name]["tokens"], seconds=found[name]["seconds"], forwards=forwards)

    with ProgressLine("decode in turns", total=len(ways) * (ROUNDS + 1)) as progress:
        samples = interleaved({name: partial(sample, name) for name in ways}, ROUNDS, progress)
    return {name: found[name] | {"seconds": [each.seconds for each in samples[name]]} for name in ways}


def by_engine(checkpoint: Checkpoint, decode: DecodeParams) -> Callable[..., list[BaselineOutput]]:
    """Return our engine as a decoder that takes one prompt after the other; eager, as the others are.

    It always looks as far ahead as the model was trained to: what it would choose itself depends on the clock.
    """
    assert checkpoint.card is not None
    decode = replace(decode, block=checkpoint.card.block)
    own = replace(checkpoint, network=deepcopy(checkpoint.network))  # an engine replaces the attention
    engine = Engine(own, EngineOptions(max_num_seqs=1, compiled=False))

    def way(
        prompts: Sequence[Sequence[int]], *, max_tokens: int, stop_ids: frozenset[int], **_known: int
    ) -> list[BaselineOutput]:
        engine.clear_cache()
        answers = [BaselineOutput(max_tokens, stop_ids) for _ in prompts]
        requests = (
            Request(id=str(number), prompt=tuple(prompt), sampling=SAMPLING, decode=decode)
            for number, prompt in enumerate(prompts)
        )
        for decoded in decode_all(engine, requests):
            answer = answers[int(decoded.request.id)]
            answer.extend(decoded.tokens)
            answer.forwards = decoded.forwards
        return answers

    return way


def decoded(
    checkpoint: Checkpoint, asked: Sequence[CalibrationPrompt], way: Callable[..., list[BaselineOutput]]
) -> Json:
    """Return the figures of a decoder."""
    encoder = ChatEncoder(checkpoint.tokenizer)
    prompts = [encoder.prompt(each.messages) for each in asked]
    started_s = time.perf_counter()
    answers = way(prompts, max_tokens=MAX_TOKENS, stop_ids=checkpoint.stop_ids, mask_id=checkpoint.mask_id)
    seconds = time.perf_counter() - started_s
    texts = [checkpoint.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
    right = [is_right(prompt, text) for prompt, text in zip(asked, texts, strict=True)]
    tokens = sum(len(answer.tokens) for answer in answers)
    return figures(asked, right) | {
        "tokens": tokens,
        "tokens_per_forward": tokens / sum(answer.forwards for answer in answers),
        "draft_forwards": sum(answer.draft_forwards for answer in answers),
        "seconds": seconds,
    }


def caches(model: Path, requests: int) -> Json:
    """Return the tokens per second of each decoder by batch."""
    torch.set_num_threads(1)
    on = subject(str(model), requests, "float32")
    found: Json = {}
    for batch in BATCHES:
        candidates, _ = contenders(on, batch)
        with ProgressLine(f"batch {batch}", total=len(candidates) * (ROUNDS + 1)) as progress:
            samples = interleaved(candidates, ROUNDS, progress)
        found[str(batch)] = {
            name: asdict(throughput(each)) | {"samples": [asdict(sample) for sample in each]}
            for name, each in samples.items()
        }
    return found


def memory(recipes: Iterable[Recipe], start: Path, data: Path, seed: int) -> Json:
    """Return the peak memory of training each recipe, in bytes above that of an idle process."""
    found: Json = {}
    for recipe in recipes:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            found[recipe.name] = {"bytes": fresh.submit(peak_memory, recipe, start, data, seed).result()}
    return found
