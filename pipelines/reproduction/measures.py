"""Measure the trained models: curves by threshold, the decoders of other papers, caches.

Each function returns figures by name as JSON. All measurements decode greedily and use the same held-out prompts.
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
from mars_ray.evaluation.calibration import CalibrationPrompt, count_answers, family_prompts, is_right, total_of
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
"""Thresholds of entropy, in nats."""
MAX_TOKENS = 96
SAMPLING = SamplingParams(max_tokens=MAX_TOKENS)
QUESTIONS_SEED = 100
"""Seed of the questions, the same for every seed of training."""
THRESHOLD = 0.95
DRAFTS = 4
"""Number of drafts per round of speculative decoding."""
BATCHES = (1, 4, 16)
ROUNDS = 3
"""Number of timed rounds, after one warm-up round."""


def questions(per_family: int) -> list[CalibrationPrompt]:
    """Return held-out questions, the same number for every family of the mixture, on which the recipes train."""
    prompts = family_prompts(per_family, range(QUESTIONS_SEED, QUESTIONS_SEED + 1))
    return [prompt for prompt in prompts if prompt.example and FAMILIES[prompt.example.family].weight]


def curve(model: Path, per_family: int) -> Json:
    """Return a row for autoregressive decoding and, if the model has a block, a row for each threshold."""
    checkpoint = load_checkpoint(model)
    decodes = {"ar": DecodeParams(mode=Mode.AR)}
    if checkpoint.card is not None and checkpoint.card.block is not None:
        decodes |= {f"{threshold:g}": DecodeParams(threshold=threshold) for threshold in THRESHOLDS}
    return _rows(checkpoint, decodes, questions(per_family))


def metrics(model: Path, per_family: int) -> Json:
    """Return a row for each metric and threshold; see `method.metric`."""
    decodes = {
        f"{metric.value} {threshold:g}": DecodeParams(threshold=threshold, metric=metric)
        for metric in Metric
        for threshold in (ENTROPIES if metric is Metric.ENTROPY else THRESHOLDS)
    }
    return _rows(load_checkpoint(model), decodes, questions(per_family))


def _rows(checkpoint: Checkpoint, decodes: Mapping[str, DecodeParams], prompts: Sequence[CalibrationPrompt]) -> Json:
    counts = count_answers(checkpoint, prompts, list(decodes.values()), SAMPLING)
    rows = {}
    for name, answers in zip(decodes, counts, strict=True):
        total = total_of(answers)
        rows[name] = figures(prompts, [bool(answer.right) for answer in answers]) | {
            "tokens": total.tokens,
            "tokens_per_forward": total.tokens_per_forward,
            "agreement": total.agreement,
        }
    return rows


def figures(prompts: Sequence[CalibrationPrompt], right: Sequence[bool]) -> Json:
    """Return the accuracy, averaged over families, and the verdict on each question."""
    verdicts: dict[str, list[bool]] = {name: [] for name, family in FAMILIES.items() if family.weight}
    for prompt, verdict in zip(prompts, right, strict=True):
        assert prompt.example is not None  # all prompts belong to families
        verdicts[prompt.example.family].append(verdict)
    by_family = {name: fmean(of_family) for name, of_family in verdicts.items()}
    return {
        "accuracy": fmean(by_family.values()),
        "by_family": by_family,
        "examples": len(prompts),
        "right": "".join(str(int(verdict)) for verdict in right),
    }


def diffusion(model: Path, block: int, per_family: int) -> Json:
    """Return a row for each threshold, and a row for one token per forward."""
    checkpoint = load_checkpoint(model)
    prompts = questions(per_family)
    thresholds = {"one at a time": 1.0} | {f"{threshold:g}": threshold for threshold in THRESHOLDS}
    return {
        name: decoded(
            checkpoint,
            prompts,
            partial(decode_block_diffusion, checkpoint.network, block=block, threshold=threshold),
        )
        for name, threshold in thresholds.items()
    }


def baselines(models: Mapping[str, Path], per_family: int) -> Json:
    """Return a row per decoder, with the seconds of each round. Decoders alternate, and decode one prompt at a time."""
    loaded = {name: load_checkpoint(path) for name, path in models.items() if name != "medusa"}
    networks = {name: checkpoint.network for name, checkpoint in loaded.items()}
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
    prompts = questions(per_family)
    rows = dict[str, Json]()

    def sample(name: str) -> Sample:
        rows[name] = decoded(loaded["ar"], prompts, ways[name])
        forwards = round(rows[name]["tokens"] / rows[name]["tokens_per_forward"])
        return Sample(tokens=rows[name]["tokens"], seconds=rows[name]["seconds"], forwards=forwards)

    with ProgressLine("decode alternately", total=len(ways) * (ROUNDS + 1)) as progress:
        samples = interleaved({name: partial(sample, name) for name in ways}, ROUNDS, progress)
    return {name: rows[name] | {"seconds": [timed.seconds for timed in samples[name]]} for name in ways}


def by_engine(checkpoint: Checkpoint, decode: DecodeParams) -> Callable[..., list[BaselineOutput]]:
    """Return our engine as a decoder of one prompt after the other, eager like the other decoders.

    The block size is fixed to the size in training, because the size that the engine would choose depends on timing.
    """
    assert checkpoint.card is not None
    decode = replace(decode, block=checkpoint.card.block)
    own = replace(checkpoint, network=deepcopy(checkpoint.network))  # an engine replaces the attention
    engine = Engine(own, EngineOptions(max_num_seqs=1))

    def way(
        prompts: Sequence[Sequence[int]], *, max_tokens: int, stop_ids: frozenset[int], **_unused: int
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
    checkpoint: Checkpoint, prompts: Sequence[CalibrationPrompt], way: Callable[..., list[BaselineOutput]]
) -> Json:
    """Return the figures of the decoder `way`."""
    encoder = ChatEncoder(checkpoint.tokenizer)
    ids = [encoder.prompt(prompt.messages) for prompt in prompts]
    started_s = time.perf_counter()
    answers = way(ids, max_tokens=MAX_TOKENS, stop_ids=checkpoint.stop_ids, mask_id=checkpoint.mask_id)
    seconds = time.perf_counter() - started_s
    texts = [checkpoint.tokenizer.decode(answer.tokens, skip_special_tokens=True) for answer in answers]
    right = [is_right(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]
    tokens = sum(len(answer.tokens) for answer in answers)
    return figures(prompts, right) | {
        "tokens": tokens,
        "tokens_per_forward": tokens / sum(answer.forwards for answer in answers),
        "draft_forwards": sum(answer.draft_forwards for answer in answers),
        "seconds": seconds,
    }


def caches(model: Path, requests: int) -> Json:
    """Return the tokens per second of each decoder, by batch size."""
    torch.set_num_threads(1)
    on = subject(str(model), requests, "float32")
    by_batch: Json = {}
    for batch in BATCHES:
        candidates, _ = contenders(on, batch)
        with ProgressLine(f"batch {batch}", total=len(candidates) * (ROUNDS + 1)) as progress:
            samples = interleaved(candidates, ROUNDS, progress)
        by_batch[str(batch)] = {
            name: asdict(throughput(rounds)) | {"samples": [asdict(sample) for sample in rounds]}
            for name, rounds in samples.items()
        }
    return by_batch


def memory(recipes: Iterable[Recipe], start: Path, data: Path, seed: int) -> Json:
    """Return the peak memory of training each recipe, in bytes above the memory of an idle process."""
    by_recipe: Json = {}
    for recipe in recipes:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
            by_recipe[recipe.name] = {"bytes": fresh.submit(peak_memory, recipe, start, data, seed).result()}
    return by_recipe
