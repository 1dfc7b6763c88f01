"""Run our engine like the others, with prompts read in one step if the limits allow it."""

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.peers.peer import TimedAnswers
from mars_ray.adapter.card import unnamed
from mars_ray.engine.core.load import load_engine
from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions, Quantize
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.model.folder import check_folder

BITS: dict[Quantize | None, int] = {None: 16, "int8": 8, "int4": 4}
"""Compared formats and the bits of their weights."""


class OwnEngine:
    """Our engine with the model in `folder`, for at most `rows` prompts of `prompt_tokens` at once.

    Raises a `ModelError` if the model cannot be quantised.
    """

    def __init__(
        self,
        folder: Path,
        rows: int,
        prompt_tokens: int,
        quantize: Quantize | None = None,
        mode: Mode = Mode.AR,
        adapter: Path | None = None,
    ) -> None:
        self.name = f"mars-ray {quantize or 'bfloat16'}" + (f" {mode}" if mode is not Mode.AR else "")
        self._mode = mode
        self.bits = BITS[quantize]
        options = EngineOptions(max_num_seqs=rows, max_prefill_tokens=rows * prompt_tokens, quantize=quantize)
        began_s = time.perf_counter()
        self._engine, _ = load_engine(check_folder(folder, "bfloat16"), options, unnamed(adapter))
        self.load_seconds = time.perf_counter() - began_s

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> TimedAnswers:
        """Answer all `prompts` together with `tokens` tokens each."""
        self._engine.clear_cache()
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        started_s = time.perf_counter()
        read_s: float | None = None
        requests = (
            Request(id=str(number), prompt=tuple(prompt), sampling=sampling, decode=DecodeParams(mode=self._mode))
            for number, prompt in enumerate(prompts)
        )
        answers: list[list[int]] = [[] for _ in prompts]
        forwards = 0
        for chunks in run_steps(self._engine, requests):
            forwards += 1
            for chunk in chunks:
                if chunk.finished and chunk.finished.error:
                    raise chunk.finished.error
                answers[int(chunk.request_id)] += chunk.tokens
            if read_s is None and all(answers):
                read_s = time.perf_counter()
                forwards = 0
        ended_s = time.perf_counter()
        assert read_s is not None, "every answer has a token"
        return TimedAnswers(
            tokens=answers, prompt_seconds=read_s - started_s, decode_seconds=ended_s - read_s, forwards=forwards
        )
