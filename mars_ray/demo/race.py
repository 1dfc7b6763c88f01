"""Races: an engine answers one prompt at a time with each setting in turn, and the time of every chunk is kept."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch

from mars_ray.adapter.card import unnamed
from mars_ray.adapter.decoding_model import open_decoding_model
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.records import Message
from mars_ray.engine.core.load import best_device, load_engine
from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions, Quantize
from mars_ray.engine.request import Request, SamplingParams
from mars_ray.evaluation.settings import AR, EXACT, DecodingSetting
from mars_ray.measure import Sample, interleaved
from mars_ray.model.resolve import model_label
from mars_ray.progress import ProgressLine

ROUNDS = 3
"""Number of measured rounds, after one warm-up round; the race shows the median round."""
MAX_TOKENS = 192


@dataclass(frozen=True, slots=True)
class RacePrompt:
    """A question, and the kind of work that it represents."""

    workload: str
    question: str
    example: tuple[str, str] | None = None
    """A question of the same kind and its answer, placed before `question`."""

    @property
    def messages(self) -> list[Message]:
        """The conversation, which ends with the question."""
        turns = zip(("user", "assistant"), self.example or (), strict=False)
        return [
            *({"role": role, "content": content} for role, content in turns),
            {"role": "user", "content": self.question},
        ]


PROMPTS = (
    RacePrompt("general", "How do plants make their food?"),
    RacePrompt(
        "reasoning steps",
        "A train travels 60 miles in the first hour and 45 miles in the second hour. How far does it travel in all? "
        "Think step by step.",
    ),
    RacePrompt(
        "structure",
        "As a JSON array: Ada is 36 and lives in London. Alan is 41 and lives in Manchester. Grace is 25 and lives in "
        "Boston.",
        (
            "As a JSON array: Nina is 29 and lives in Oslo. Omar is 51 and lives in Cairo.",
            '[\n  {"name": "Nina", "age": 29, "city": "Oslo"},\n  {"name": "Omar", "age": 51, "city": "Cairo"}\n]',
        ),
    ),
)
"""One prompt per kind of work, from hard to easy to predict."""


@dataclass(frozen=True, slots=True)
class TimedChunk:
    """The tokens of one forward."""

    at_s: float
    """Seconds since the request was added."""
    tokens: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane(Sample):
    """The answer of one setting to the prompt."""

    setting: str
    chunks: tuple[TimedChunk, ...]

    def until(self, at_s: float) -> "Lane":
        """Return the part of the answer that had been decoded `at_s` seconds after the request was added."""
        chunks = tuple(chunk for chunk in self.chunks if chunk.at_s <= at_s)
        return Lane(
            setting=self.setting,
            chunks=chunks,
            tokens=sum(chunk.tokens for chunk in chunks),
            forwards=len(chunks),
            seconds=min(at_s, self.seconds),
        )

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens divided by forwards; 1 before the first forward."""
        return self.tokens / self.forwards if self.forwards else 1.0


@dataclass(frozen=True, slots=True)
class Race:
    """A prompt, and the answers of all settings, with autoregressive decoding first."""

    prompt: RacePrompt
    lanes: tuple[Lane, ...]

    @property
    def first_s(self) -> float:
        """Seconds until the fastest setting finished."""
        return min(lane.seconds for lane in self.lanes)

    @property
    def last_s(self) -> float:
        """Seconds until the slowest setting finished."""
        return max(lane.seconds for lane in self.lanes)


def settings_at(threshold: float) -> tuple[DecodingSetting, ...]:
    """Return the settings to compare: ar, exact, and one threshold."""
    return AR, EXACT, DecodingSetting(mode=Mode.THRESHOLD, threshold=threshold)


class Track:
    """A model, with or without an adapter, that answers a prompt at every setting. Use it as a context manager.

    A model that does not look ahead has no thresholds; exact mode then drafts from text alone. `threshold` None means
    0.1 with an adapter, where it is a ratio of drafts, and 0.9 without. Raises the errors of `load_engine` and
    `open_decoding_model`.
    """

    def __init__(
        self,
        model: str,
        adapter: str | None,
        *,
        quantize: Quantize | None = None,
        threshold: float | None = None,
        max_tokens: int = MAX_TOKENS,
        rounds: int = ROUNDS,
    ) -> None:
        decoding = open_decoding_model(model, adapter, device=best_device())
        resolved = decoding.base
        looks_ahead = decoding.card is not None and decoding.card.block is not None
        if threshold is None:
            threshold = 0.1 if adapter else 0.9
        self._settings = settings_at(threshold) if looks_ahead else (AR, EXACT)
        self._sampling = SamplingParams(max_tokens=max_tokens)
        self._rounds = rounds
        options = EngineOptions(max_num_seqs=1, quantize=quantize)
        self._engine, checkpoint = load_engine(resolved, options, unnamed(decoding.adapter))
        self._encoder = ChatEncoder(checkpoint.tokenizer)
        weights = quantize or resolved.dtype.name
        with_adapter = f" with the adapter {adapter}" if adapter else ""
        threads = torch.get_num_threads()
        threads_text = f"{threads} thread{'s' if threads > 1 else ''}"
        self.label = f"{model_label(model, resolved.folder)}{with_adapter}, {weights}, {threads_text}"
        """Model, adapter, format of the weights and threads used in the races."""

    def race(self, prompt: RacePrompt) -> Race:
        """Answer a prompt alone with each setting in turn, and return the median round of each setting."""
        tokens = tuple(self._encoder.prompt(prompt.messages))
        candidates = {setting.name: partial(self._decode, tokens, setting) for setting in self._settings}
        turns = len(candidates) * (self._rounds + 1)
        with ProgressLine(f"{prompt.workload}: decode in turns", total=turns) as progress:
            samples = interleaved(candidates, self._rounds, progress)
        in_order = (sorted(lanes, key=lambda lane: lane.seconds) for lanes in samples.values())
        return Race(prompt, tuple(lanes[len(lanes) // 2] for lanes in in_order))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.close()

    def _decode(self, prompt: tuple[int, ...], setting: DecodingSetting) -> Lane:
        self._engine.clear_cache()  # otherwise only the first setting would read the prompt
        request = Request(id=setting.name, prompt=prompt, sampling=self._sampling, decode=setting.decode)
        started_s = time.perf_counter()
        timed: list[TimedChunk] = []
        for chunks in run_steps(self._engine, [request]):
            at_s = time.perf_counter() - started_s
            for chunk in chunks:
                if chunk.finished and chunk.finished.error:
                    raise chunk.finished.error
                if chunk.tokens or chunk.text:
                    timed.append(TimedChunk(at_s, len(chunk.tokens), chunk.text))
        return Lane(
            setting=setting.name,
            chunks=tuple(timed),
            tokens=sum(chunk.tokens for chunk in timed),
            forwards=sum(bool(chunk.tokens) for chunk in timed),
            seconds=timed[-1].at_s,
        )
