"""The compared decoders: our engine in its modes, transformers, and the decoders of the paper."""

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch

from benchmarks.decode.block_cache import decode_block_cache
from benchmarks.decode.replay import ReplayEngine
from benchmarks.decode.script import Script, record
from benchmarks.decode.shapes import PREFIX, resolve_shape
from benchmarks.decode.transformers_peers import PeerRun, Unavailable, generate_continuous, generate_static
from benchmarks.decode.workload import Workload, bundled_workload
from mars_ray.engine.chunk import Finished
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.measure import Sample
from mars_ray.method.reference import DecodedSequence, DecodeOptions, decode
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.dtype import DtypeOrAuto, ResolvedDtype, resolve_dtype
from mars_ray.model.folder import count_parameters
from mars_ray.model.resolve import pin, resolve_model

THRESHOLD = 0.95
CACHE_BLOCKS = (8, 16, 32)
"""Block sizes of the paper's cache; the fastest is compared with the engine."""

Contender = Callable[[], Sample]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model under test and its requests."""

    name: str
    checkpoint: Checkpoint
    """The model for the other decoders; engines get copies because they replace the attention."""
    workload: Workload
    dtype: ResolvedDtype
    scripts: list[Script] | None
    """Proposals of the bundled model, replayed over random weights; None for a real model."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Stop ids; empty for random weights, which stop at the length of the bundled model's answer."""
        return frozenset() if self.scripts else self.checkpoint.stop_ids


def subject(name: str, requests: int, dtype: DtypeOrAuto, seed: int = 0) -> Subject:
    """Return the bundled model, a shape, or the model in a folder. Raises an `InputError` for others."""
    if not name.startswith(PREFIX):
        folder = resolve_model(name)
        resolved = resolve_dtype(dtype, count_parameters(folder), "cpu")
        checkpoint = load_checkpoint(folder, dtype=getattr(torch, resolved.name))
        return Subject(pin(name, folder), checkpoint, bundled_workload(checkpoint, requests, seed), resolved, None)
    bundled = load_checkpoint(resolve_model("bundled"))
    workload = bundled_workload(bundled, requests, seed)
    assert bundled.card is not None and bundled.card.block is not None
    scripts = record(bundled, workload.prompts, workload.lengths, bundled.card.block)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = ResolvedDtype("bfloat16", "that of the shapes") if dtype == "auto" else ResolvedDtype(dtype, "asked for")
    network = resolve_shape(name, dtype=getattr(torch, resolved.name), device=device)
    return Subject(name, replace(bundled, network=network), workload, resolved, scripts)


def contenders(case: Subject, batch: int) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the decoders for up to `batch` requests at once, and the reasons why others cannot run."""
    decoders: dict[str, Contender] = {
        "ar": engine_contender(case, batch, DecodeParams(mode=Mode.AR)),
        f"threshold {THRESHOLD}": engine_contender(case, batch, DecodeParams(threshold=THRESHOLD)),
        "exact": engine_contender(case, batch, DecodeParams(mode=Mode.EXACT)),
        "generate": lambda: _peer(
            generate_static(
                case.checkpoint.network, case.workload.prompts, case.workload.lengths, batch, stop_ids=case.stop_ids
            )
        ),
    }
    unavailable: dict[str, str] = {}
    continuous_run = _continuous(case, batch)
    if isinstance(continuous_run, Unavailable):
        unavailable["generate_batch"] = continuous_run.reason
    else:
        decoders["generate_batch"] = lambda: _peer(_continuous(case, batch))
    for block in CACHE_BLOCKS:
        decoders[f"block cache {block}"] = lambda block=block: _static(case, batch, block)  # type: ignore[misc]
    if case.scripts is None:
        decoders["no cache"] = lambda: _static(case, batch, None)
    else:
        unavailable["no cache"] = "runs on real weights only"
    return decoders, unavailable


def engine_contender(case: Subject, batch: int, decoding: DecodeParams) -> Contender:
    """Return our engine with up to `batch` requests at once."""
    checkpoint = replace(case.checkpoint, network=deepcopy(case.checkpoint.network))
    options = EngineOptions(max_num_seqs=batch)
    engine = ReplayEngine(checkpoint, options, case.scripts) if case.scripts else Engine(checkpoint, options)

    def run() -> Sample:
        engine.clear_cache()
        requests = []
        for number, (prompt, length) in enumerate(zip(case.workload.prompts, case.workload.lengths, strict=True)):
            sampling = SamplingParams(max_tokens=length, ignore_eos=case.scripts is not None)
            requests.append(Request(id=str(number), prompt=prompt, sampling=sampling, decode=decoding))
        started_s = step_began_s = time.perf_counter()
        finishes: list[Finished] = []
        begun: set[str] = set()
        tokens = 0
        forwards = 0
        decoding_s = 0.0
        for chunks in run_steps(engine, requests):
            step_s = time.perf_counter() - step_began_s
            finishes += [chunk.finished for chunk in chunks if chunk.finished]
            if batch == 1 and chunks and chunks[0].request_id in begun:
                tokens += len(chunks[0].tokens)
                forwards += 1
                decoding_s += step_s
            begun.update(chunk.request_id for chunk in chunks)
            step_began_s = time.perf_counter()
        seconds = time.perf_counter() - started_s
        errors = [finish.error for finish in finishes if finish.error]
        if errors:
            raise errors[0]
        return Sample(
            tokens=sum(finish.tokens for finish in finishes),
            seconds=seconds,
            forwards=sum(finish.forwards for finish in finishes),
            decoding=Sample(tokens=tokens, seconds=decoding_s, forwards=forwards) if forwards else None,
        )

    return run


def _continuous(case: Subject, batch: int) -> PeerRun | Unavailable:
    work = case.workload
    return generate_continuous(case.checkpoint.network, work.prompts, work.lengths, batch, stop_ids=case.stop_ids)


def _peer(run: PeerRun | Unavailable) -> Sample:
    assert isinstance(run, PeerRun), "it ran before"
    return Sample(tokens=run.tokens, seconds=run.seconds, forwards=run.tokens)


def _static(case: Subject, batch: int, cache_block: int | None) -> Sample:
    """Run a decoder of the paper: static batches with a block cache, or without a cache."""
    card = case.checkpoint.card
    mask_id = case.checkpoint.mask_id
    block = (card and card.block) or 1
    sequences: list[DecodedSequence] = []
    started_s = time.perf_counter()
    for start in range(0, len(case.workload.prompts), batch):
        rows = slice(start, start + batch)
        prompts = case.workload.prompts[rows]
        lengths = case.workload.lengths[rows]
        options = DecodeOptions(threshold=THRESHOLD, block=block, max_tokens=max(lengths), stop_ids=case.stop_ids)
        network = case.checkpoint.network
        if cache_block is None:
            sequences += decode(network, prompts, options, mask_id=mask_id)
        else:
            scripts = case.scripts and case.scripts[rows]
            sequences += decode_block_cache(
                network, prompts, options, mask_id=mask_id, cache_block=cache_block, script=scripts, lengths=lengths
            )
    seconds = time.perf_counter() - started_s
    tokens = sum(len(sequence.tokens) for sequence in sequences)
    return Sample(tokens=tokens, seconds=seconds, forwards=sum(sequence.forwards for sequence in sequences))
