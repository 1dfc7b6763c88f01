"""Run OpenVINO GenAI on a CPU, with the .gguf files of llama.cpp."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.llama_cpp import FORMATS, quantised_file
from benchmarks.peers.peer import PeerUnavailableError, TimedAnswers

INSTALL = "pip install 'mars-ray[peers-openvino]'"


class OpenVino:
    """OpenVINO GenAI with one .gguf file, on `threads` threads. Prompts answered together must have one length."""

    def __init__(self, file: Path, kind: str, threads: int) -> None:
        self.name = f"openvino {kind}"
        self.bits = FORMATS[kind]
        self._api, self._tensor = _api()
        # Paged attention would reuse the prompts of earlier calls.
        settings = {"ATTENTION_BACKEND": "SDPA", "INFERENCE_NUM_THREADS": threads}
        began_s = time.perf_counter()
        try:
            self._pipeline = self._api.LLMPipeline(str(file), "CPU", **settings)
        except RuntimeError as error:
            raise PeerUnavailableError(f"openvino cannot load {file}: {str(error).splitlines()[-1]}") from error
        self.load_seconds = time.perf_counter() - began_s

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> TimedAnswers:
        """Answer all `prompts` together with `tokens` tokens each."""
        ids_RT = np.array(prompts, dtype=np.int64)
        inputs = self._api.TokenizedInputs(self._tensor(ids_RT), self._tensor(np.ones_like(ids_RT)))
        config = self._api.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        started_s = time.perf_counter()
        result = self._pipeline.generate(inputs, config)
        seconds = time.perf_counter() - started_s
        prompt_seconds = result.perf_metrics.get_ttft().mean / 1000
        return TimedAnswers(
            tokens=[list(answer) for answer in result.tokens],
            prompt_seconds=prompt_seconds,
            decode_seconds=seconds - prompt_seconds,
            forwards=tokens - 1,
        )


def openvino_peers(folder: Path, threads: int, _never_id: int) -> list[OpenVino]:
    """Return OpenVINO with the model in `folder` in each format. Raises a `PeerUnavailableError` with the reason."""
    _api()
    return [OpenVino(quantised_file(folder, kind), kind, threads) for kind in FORMATS]


def _api() -> tuple[Any, Any]:
    """Return the module of OpenVINO GenAI, and OpenVINO's class `Tensor`."""
    try:
        import openvino_genai
        from openvino import Tensor
    except ImportError as error:
        raise PeerUnavailableError(f"not installed: {INSTALL}") from error
    return openvino_genai, Tensor
