"""Where races are run: a model, an engine for one sequence at a time, and settings that decode in turns."""

import time
from functools import partial
from typing import Self

import torch

from mars_ray.adapter.card import decoding_card, resolve_adapter, unnamed
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.core.load import best_device, load_engine
from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import Request, SamplingParams
from mars_ray.errors import ModelError
from mars_ray.evaluation.settings import AR, EXACT, DecodingSetting
from mars_ray.measure import interleaved
from mars_ray.model.folder import open_model
from mars_ray.model.resolve import model_label
from mars_ray.progress import ProgressLine
from mars_ray.race.lanes import Lane, Race, TimedChunk
from mars_ray.race.prompts import RacePrompt

SETTINGS = (AR, EXACT, DecodingSetting(mode=Mode.THRESHOLD, threshold=0.9))
ROUNDS = 3
"""Rounds that are measured, behind one that warms up; the one of middle length is shown."""
MAX_TOKENS = 192


class Track:
    """A model, perhaps with an adapter, that answers the same prompt at every setting; use as a context manager.

    Raises `ModelError` for a model that does not look ahead, and what `load_engine` and `resolve_adapter` raise.
    """

    def __init__(self, model: str, adapter: str | None, *, max_tokens: int = MAX_TOKENS, rounds: int = ROUNDS) -> None:
        resolved = open_model(model, device=best_device())
        adapter_folder = resolve_adapter(adapter)
        card = decoding_card(resolved.folder, adapter_folder)
        if card is None or card.block is None:
            raise ModelError(f"{model} was not trained to look ahead, so there is no race. Name an adapter for it.")
        self._sampling, self._rounds = SamplingParams(max_tokens=max_tokens), rounds
        # Compiling takes longer than a race, and rounds with and without compiled steps could not be compared.
        options = EngineOptions(max_num_seqs=1, compiled=False)
        self._engine, checkpoint = load_engine(resolved, options, unnamed(adapter_folder))
        self._encoder = ChatEncoder(checkpoint.tokenizer)
        with_adapter = f" with the adapter {adapter}" if adapter else ""
        threads = torch.get_num_threads()
        on = f"{threads} thread{'s' if threads > 1 else ''}"
        self.label = f"{model_label(model, resolved.folder)}{with_adapter}, {resolved.dtype.name}, {on}"
        """What races here: model, adapter, dtype and threads."""

    def race(self, prompt: RacePrompt) -> Race:
        """Answer a prompt at each setting alone, in turns, and return the round of middle length of each."""
        tokens = tuple(self._encoder.prompt(prompt.messages))
        candidates = {each.name: partial(self._decode, tokens, each) for each in SETTINGS}
        turns = len(SETTINGS) * (self._rounds + 1)
        with ProgressLine(f"{prompt.workload}: decode in turns", total=turns) as progress:
            samples = interleaved(candidates, self._rounds, progress)
        in_order = (sorted(lanes, key=lambda lane: lane.seconds) for lanes in samples.values())
        return Race(prompt, tuple(lanes[len(lanes) // 2] for lanes in in_order))

    def close(self) -> None:
        """Stop what the engine has running."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _decode(self, prompt: tuple[int, ...], setting: DecodingSetting) -> Lane:
        self._engine.clear_cache()  # else only the first would have to read the prompt
        request = Request(id=setting.name, prompt=prompt, sampling=self._sampling, decode=setting.decode)
        started_s = time.perf_counter()
        chunks: list[TimedChunk] = []
        for given in run_steps(self._engine, [request]):
            at_s = time.perf_counter() - started_s
            for chunk in given:
                if chunk.finished and chunk.finished.error:
                    raise chunk.finished.error
                if chunk.tokens or chunk.text:
                    chunks.append(TimedChunk(at_s, len(chunk.tokens), chunk.text))
        return Lane(
            setting=setting.name,
            chunks=tuple(chunks),
            tokens=sum(chunk.tokens for chunk in chunks),
            forwards=sum(bool(chunk.tokens) for chunk in chunks),
            seconds=chunks[-1].at_s,
        )
