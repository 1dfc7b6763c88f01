"""Run other engines and ours on the same model, prompts, lengths and threads, in turns.

Prompts of one length are read together, then answered together; the two phases are timed separately. All engines decode
greedily. If the model is a .gguf file, llama.cpp also runs it as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.peers.llama_cpp import LlamaCpp, llama_cpp_peers
from benchmarks.peers.openvino import openvino_peers
from benchmarks.peers.own_engine import BITS, OwnEngine
from benchmarks.peers.peer import Peer, PeerUnavailableError
from benchmarks.peers.prompts import PROMPT_TOKENS, prompts_of_one_length
from benchmarks.peers.vllm import vllm_peers
from mars_ray.errors import ConfigError, ModelError
from mars_ray.measure import Sample, interleaved
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.model.sources.store import fetched_from_store
from mars_ray.progress import ProgressLine
from mars_ray.storage.location import FILE_URL, is_url

ANSWER_TOKENS = 64
Factory = Callable[[Path, int, int], Sequence[Peer]]
"""Function that makes engines from a model folder, a number of threads, and the id that is never chosen."""
FACTORIES: dict[str, Factory] = {"llama.cpp": llama_cpp_peers, "openvino": openvino_peers, "vllm": vllm_peers}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSample(Sample):
    """One timed run; the fields of `Sample` cover decoding without prefill."""

    prompt_tokens: int
    prompt_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerBatch:
    """Results of all engines with `batch` requests at once."""

    batch: int
    samples: dict[str, list[PeerSample]]
    same: dict[str, float]
    """Share of tokens before the first difference from our answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerComparison:
    """Results of a comparison."""

    bits: dict[str, int]
    """Bits per weight of each engine, ours first."""
    load_seconds: dict[str, float]
    """Seconds that each engine took to load the model."""
    absent: dict[str, str]
    """Engines that cannot run here, each with its reason."""
    batches: list[PeerBatch]


def compare_peers(
    name: str, peers: Sequence[str], batches: Sequence[int], requests: int, repeats: int, threads: int
) -> PeerComparison:
    """Measure `requests` requests at each batch size, `repeats` times. Raises an `InputError`."""
    unknown = [peer for peer in peers if peer not in FACTORIES]
    if unknown:
        raise ConfigError(f"unknown peer {unknown[0]!r}; choose from {', '.join(FACTORIES)}.")
    torch.set_num_threads(threads)
    folder = resolve_model(name)
    checkpoint = load_checkpoint(folder)
    prompts = prompts_of_one_length(checkpoint, max(requests, *batches))
    factories = {peer: FACTORIES[peer] for peer in peers}
    if "llama.cpp" in peers and name.endswith(".gguf"):
        file = fetched_from_store(name) if is_url(name) else Path(name.removeprefix(FILE_URL)).expanduser()
        factories["llama.cpp, the file"] = partial(_file_peers, file)
    others, absent = _others(factories, folder, threads, checkpoint.mask_id)
    del checkpoint
    ours, not_ours = _ours(folder, max(batches))
    engines: dict[str, Peer] = {peer.name: peer for peer in (*ours, *others)}
    results = []
    for batch in batches:
        groups = [prompts[start : start + batch] for start in range(0, max(requests, batch) - batch + 1, batch)]
        first_answers = {name: peer.answer(groups[0], ANSWER_TOKENS).tokens for name, peer in engines.items()}
        with ProgressLine(f"batch {batch}", total=len(engines) * (repeats + 1)) as progress:
            candidates = {name: _candidate(peer, groups) for name, peer in engines.items()}
            samples = interleaved(candidates, repeats, progress)
        same = {name: shared(answers, first_answers[ours[0].name]) for name, answers in first_answers.items()}
        results.append(PeerBatch(batch=batch, samples=samples, same=same))
    return PeerComparison(
        bits={name: peer.bits for name, peer in engines.items()},
        load_seconds={name: peer.load_seconds for name, peer in engines.items()},
        absent=not_ours | absent,
        batches=results,
    )


def shared(answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> float:
    """Return the share of the tokens in `others` before the first difference of each pair of answers."""
    equal = 0
    for answer, other in zip(answers, others, strict=True):
        differs = (position for position, pair in enumerate(zip(answer, other, strict=True)) if pair[0] != pair[1])
        equal += next(differs, len(other))
    return equal / sum(map(len, others))


def _ours(folder: Path, rows: int) -> tuple[list[OwnEngine], dict[str, str]]:
    """Return our engine in each format, and the reasons why other formats fail."""
    engines: list[OwnEngine] = []
    absent = {}
    for quantize in BITS:
        try:
            engines.append(OwnEngine(folder, rows, PROMPT_TOKENS, quantize))
        except ModelError as error:
            absent[f"mars-ray {quantize}"] = str(error).rstrip(".")
    return engines, absent


def _file_peers(file: Path, _folder: Path, threads: int, never_id: int) -> list[LlamaCpp]:
    """Return llama.cpp with a .gguf file as it is."""
    return [LlamaCpp(file, "the file", threads, never_id)]


def _others(
    factories: Mapping[str, Factory], folder: Path, threads: int, never_id: int
) -> tuple[list[Peer], dict[str, str]]:
    engines: list[Peer] = []
    absent = {}
    for name, factory in factories.items():
        try:
            engines += factory(folder, threads, never_id)
        except PeerUnavailableError as error:
            absent[name] = str(error)
    return engines, absent


def _candidate(peer: Peer, groups: Sequence[Sequence[Sequence[int]]]) -> Callable[[], PeerSample]:
    def run() -> PeerSample:
        answers = [peer.answer(group, ANSWER_TOKENS) for group in groups]
        return PeerSample(
            tokens=sum(len(tokens) - 1 for answer in answers for tokens in answer.tokens),
            seconds=sum(answer.decode_seconds for answer in answers),
            forwards=sum(answer.forwards for answer in answers),
            prompt_tokens=sum(len(prompt) for group in groups for prompt in group),
            prompt_seconds=sum(answer.prompt_seconds for answer in answers),
        )

    return run
