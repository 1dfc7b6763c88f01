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
from mars_ray.engine.core.adapters import BLOCK_WITHOUT_CARD
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.measure import Sample
from mars_ray.method.reference import DecodedSequence, DecodeOptions, decode
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.dtype import DtypeOrAuto, ResolvedDtype, resolve_dtype
from mars_ray.model.resolve import pin, resolve_model

THRESHOLD = 0.95
CACHE_BLOCKS = (8, 16, 32)
"""Block sizes of the paper's cache; the fastest is compared."""

Contender = Callable[[], Sample]


@dataclass(frozen=True, slots=True)
class Subject:
    """A model under test and its requests."""

    name: str
    checkpoint: Checkpoint
    """The model of the peers; engines get copies because they replace the attention."""
    workload: Workload
    dtype: ResolvedDtype
    scripts: list[Script] | None
    """Proposals of the bundled model, replayed over random weights; None for a real model."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Stop ids; random weights only stop at the length of the bundled model's answer."""
        return frozenset() if self.scripts else self.checkpoint.stop_ids


def subject(name: str, requests: int, dtype: DtypeOrAuto, seed: int = 0) -> Subject:
    """Return the bundled model, a shape, or the model in a folder. Raises an `InputError` for others."""
    if not name.startswith(PREFIX):
        folder = resolve_model(name)
        resolved = resolve_dtype(dtype, folder, "cpu")
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


def contenders(on: Subject, batch: int) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the decoders for up to `batch` requests at once, and the reasons for those that cannot run."""
    decoders: dict[str, Contender] = {
        "ar, eager": engine_contender(on, batch, DecodeParams(mode=Mode.AR), compiled=False),
        "ar": engine_contender(on, batch, DecodeParams(mode=Mode.AR)),
        f"threshold {THRESHOLD}": engine_contender(on, batch, DecodeParams(threshold=THRESHOLD)),
        "exact": engine_contender(on, batch, DecodeParams(mode=Mode.EXACT)),
        f"threshold {THRESHOLD}, eager": engine_contender(on, batch, DecodeParams(threshold=THRESHOLD), compiled=False),
        "generate": lambda: _peer(
            generate_static(
                on.checkpoint.network, on.workload.prompts, on.workload.lengths, batch, stop_ids=on.stop_ids
            )
        ),
    }
    absent: dict[str, str] = {}
    tried = _continuous(on, batch)
    if isinstance(tried, Unavailable):
        absent["generate_batch"] = tried.reason
    else:
        decoders["generate_batch"] = lambda: _peer(_continuous(on, batch))
    for block in CACHE_BLOCKS:
        decoders[f"block cache {block}"] = lambda block=block: _static(on, batch, block)  # type: ignore[misc]
    if on.scripts is None:
        decoders["no cache"] = lambda: _static(on, batch, None)
    else:
        absent["no cache"] = "it runs on real weights only"
    return decoders, absent


def engine_contender(on: Subject, batch: int, decoding: DecodeParams, compiled: bool = True) -> Contender:
    """Return our engine with up to `batch` requests at once, with compiled steps if possible."""
    own = replace(on.checkpoint, network=deepcopy(on.checkpoint.network))
    options = EngineOptions(max_num_seqs=batch, compiled=compiled)
    engine = ReplayEngine(own, options, on.scripts) if on.scripts else Engine(own, options)
    engine.wait_until_compiled()

    def run() -> Sample:
        engine.clear_cache()
        requests = []
        for number, (prompt, length) in enumerate(zip(on.workload.prompts, on.workload.lengths, strict=True)):
            sampling = SamplingParams(max_tokens=length, ignore_eos=on.scripts is not None)
            requests.append(Request(id=str(number), prompt=prompt, sampling=sampling, decode=decoding))
        started_s = step_began_s = time.perf_counter()
        ended: list[Finished] = []
        begun: set[str] = set()
        tokens, forwards, decoding_s = 0, 0, 0.0
        for chunks in run_steps(engine, requests):
            step_s = time.perf_counter() - step_began_s
            ended += [chunk.finished for chunk in chunks if chunk.finished]
            if batch == 1 and chunks and chunks[0].request_id in begun:
                tokens, forwards, decoding_s = tokens + len(chunks[0].tokens), forwards + 1, decoding_s + step_s
            begun.update(chunk.request_id for chunk in chunks)
            step_began_s = time.perf_counter()
        seconds = time.perf_counter() - started_s
        errors = [each.error for each in ended if each.error]
        if errors:
            raise errors[0]
        return Sample(
            tokens=sum(each.tokens for each in ended),
            seconds=seconds,
            forwards=sum(each.forwards for each in ended),
            decoding=Sample(tokens=tokens, seconds=decoding_s, forwards=forwards) if forwards else None,
        )

    return run


def _continuous(on: Subject, batch: int) -> PeerRun | Unavailable:
    work = on.workload
    return generate_continuous(on.checkpoint.network, work.prompts, work.lengths, batch, stop_ids=on.stop_ids)


def _peer(run: PeerRun | Unavailable) -> Sample:
    assert isinstance(run, PeerRun), "it ran before"
    return Sample(tokens=run.tokens, seconds=run.seconds, forwards=run.tokens)


def _static(on: Subject, batch: int, cache_block: int | None) -> Sample:
    """Run a decoder of the paper: static batches with a block cache, or without a cache."""
    card, mask_id = on.checkpoint.card, on.checkpoint.mask_id
    block = (card and card.block) or BLOCK_WITHOUT_CARD
    decoded: list[DecodedSequence] = []
    started_s = time.perf_counter()
    for start in range(0, len(on.workload.prompts), batch):
        rows = slice(start, start + batch)
        prompts, lengths = on.workload.prompts[rows], on.workload.lengths[rows]
        options = DecodeOptions(threshold=THRESHOLD, block=block, max_tokens=max(lengths), stop_ids=on.stop_ids)
        network = on.checkpoint.network
        if cache_block is None:
            decoded += decode(network, prompts, options, mask_id=mask_id)
        else:
            scripts = on.scripts and on.scripts[rows]
            decoded += decode_block_cache(
                network, prompts, options, mask_id=mask_id, cache_block=cache_block, script=scripts
            )
    seconds = time.perf_counter() - started_s
    # Tokens of random weights after the recorded length are not part of the answer.
    pairs = list(zip(decoded, on.workload.lengths, strict=True))
    tokens = sum(min(len(each.tokens), length) if on.scripts else len(each.tokens) for each, length in pairs)
    return Sample(tokens=tokens, seconds=seconds, forwards=sum(each.forwards for each in decoded))
