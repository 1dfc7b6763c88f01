"""Run llama.cpp through its C interface, with all sequences of a step in one `llama_decode`, as its server does."""

import ctypes
import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.peer import PeerUnavailableError, TimedAnswers
from mars_ray.model.digest import folder_digest
from mars_ray.model.sources.cache import made_once
from mars_ray.model.sources.gguf_file import GGUFFile

INSTALL = "pip install 'mars-ray[peers-llama-cpp]'"
FORMATS = {"F16": 16, "Q8_0": 8, "Q4_0": 4}
"""Compared formats of the weights, and their bits."""
LEAST_BATCH = 16
"""Positions per sequence for which a step has room, at least."""
ROUND = 32
"""Cells of the cache per sequence are rounded up to a multiple of this, as llama.cpp requires."""


class LlamaCpp:
    """llama.cpp with one .gguf file, on `threads` threads.

    `never_id`, our mask token, is never chosen. An answer ends with the first of `stop_ids`.
    """

    def __init__(
        self, file: Path, kind: str, threads: int, never_id: int, stop_ids: Collection[int] = frozenset()
    ) -> None:
        self.name = f"llama.cpp {kind}"
        self._api = api = _api()
        self.bits = FORMATS.get(kind) or bits_of(file)
        self._stop_ids = stop_ids
        self._threads = threads
        self._never_id = never_id
        settings = api.llama_model_default_params()
        began_s = time.perf_counter()
        self._model = api.llama_model_load_from_file(str(file).encode(), settings)
        if not self._model:
            raise PeerUnavailableError(f"llama.cpp cannot load {file}")
        self.load_seconds = time.perf_counter() - began_s
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._shape: tuple[int, int, int] | None = None
        self._context: Any = None
        self._batch: Any = None

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> TimedAnswers:
        """Answer all `prompts` together with `tokens` tokens each."""
        self._prepare((len(prompts), max(map(len, prompts)), tokens))
        started_s = time.perf_counter()
        flat = [(row, position, token) for row, prompt in enumerate(prompts) for position, token in enumerate(prompt)]
        ends = [len(prompts[row]) - 1 for row in range(len(prompts))]
        answers = [[token] for token in self._step(flat, [position == ends[row] for row, position, _ in flat])]
        read_s = time.perf_counter()
        forwards = 0
        while open_rows := [row for row, answer in enumerate(answers) if self._goes_on(answer, tokens)]:
            inputs = [(row, ends[row] + len(answers[row]), answers[row][-1]) for row in open_rows]
            for row, token in zip(open_rows, self._step(inputs, [True] * len(inputs)), strict=True):
                answers[row].append(token)
            forwards += 1
        ended_s = time.perf_counter()
        return TimedAnswers(
            tokens=answers,
            prompt_seconds=read_s - started_s,
            decode_seconds=ended_s - read_s,
            forwards=forwards,
        )

    def close(self) -> None:
        """Free the model and its cache."""
        self._free_context()
        self._api.llama_model_free(self._model)

    def _goes_on(self, answer: Sequence[int], tokens: int) -> bool:
        return len(answer) < tokens and answer[-1] not in self._stop_ids

    def _prepare(self, shape: tuple[int, int, int]) -> None:
        """Make or clear the cache for a number of rows, prompt tokens and answer tokens."""
        if shape == self._shape:
            self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)
            return
        self._free_context()
        rows, prompt, answer = shape
        settings = self._api.llama_context_default_params()
        settings.n_seq_max = rows
        settings.n_ctx = rows * -(-(prompt + answer) // ROUND) * ROUND
        settings.n_batch = rows * max(prompt, LEAST_BATCH)
        settings.n_threads = settings.n_threads_batch = self._threads
        self._context = self._api.llama_init_from_model(self._model, settings)
        if not self._context:
            raise PeerUnavailableError(f"llama.cpp cannot make a context for {rows} sequences")
        self._batch = self._api.llama_batch_init(rows * max(prompt, LEAST_BATCH), 0, 1)
        self._shape = shape

    def _free_context(self) -> None:
        if self._shape is not None:
            self._api.llama_batch_free(self._batch)
            self._api.llama_free(self._context)
            self._shape = None

    def _step(self, inputs: Sequence[tuple[int, int, int]], selected: Sequence[bool]) -> list[int]:
        """Feed triples of sequence, position and token; return the most likely next token of each selected triple."""
        batch = self._batch
        batch.n_tokens = len(inputs)
        for index, (row, position, token) in enumerate(inputs):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = row
            batch.logits[index] = selected[index]
        failed = self._api.llama_decode(self._context, batch)
        if failed:
            raise PeerUnavailableError(f"llama_decode returned {failed}")
        return [self._choice(index) for index, is_selected in enumerate(selected) if is_selected]

    def _choice(self, index: int) -> int:
        pointer = self._api.llama_get_logits_ith(self._context, index)
        logits_V = np.ctypeslib.as_array(pointer, (self._vocabulary,))
        if self._never_id < self._vocabulary:
            logits_V[self._never_id] = -np.inf
        return int(logits_V.argmax())


class LlamaCppLookup(LlamaCpp):
    """llama.cpp with prompt lookup: drafts are what followed the latest place of the last tokens, as its example does.

    llama.cpp's own program answers one request at a time; here all sequences of a step share a `llama_decode`.
    """

    GRAMS, DRAFTS = (4, 3, 2), 8
    """Lengths of the matches, and most drafts of a step."""

    def answer(self, prompts: Sequence[Sequence[int]], tokens: int) -> TimedAnswers:
        """Answer all `prompts` together with `tokens` tokens each."""
        longest = max(map(len, prompts))
        self._prepare((len(prompts), longest, tokens + self.DRAFTS))
        memory = self._api.llama_get_memory(self._context)
        started_s = time.perf_counter()
        flat = [(row, position, token) for row, prompt in enumerate(prompts) for position, token in enumerate(prompt)]
        ends = [len(prompt) - 1 for prompt in prompts]
        first = self._step(flat, [position == ends[row] for row, position, _ in flat])
        texts = [_Text(prompt, self.GRAMS) for prompt in prompts]
        for text, token in zip(texts, first, strict=True):
            text.add(token)
        read_s = time.perf_counter()
        forwards = 0
        while open_rows := [row for row, text in enumerate(texts) if len(text.tokens) < len(prompts[row]) + tokens]:
            drafts = [texts[row].continuation(self.DRAFTS) for row in open_rows]
            inputs = [
                (row, len(texts[row].tokens) - 1 + place, token)
                for row, draft in zip(open_rows, drafts, strict=True)
                for place, token in enumerate([texts[row].tokens[-1], *draft])
            ]
            chosen = iter(self._step(inputs, [True] * len(inputs)))
            forwards += 1
            for row, draft in zip(open_rows, drafts, strict=True):
                after = [next(chosen) for _ in range(len(draft) + 1)]
                right = next((place for place, token in enumerate(draft) if token != after[place]), len(draft))
                for token in after[: right + 1]:
                    texts[row].add(token)
                self._api.llama_memory_seq_rm(memory, row, len(texts[row].tokens) - 1, -1)
        ended_s = time.perf_counter()
        return TimedAnswers(
            tokens=[
                text.tokens[len(prompt) : len(prompt) + tokens] for prompt, text in zip(prompts, texts, strict=True)
            ],
            prompt_seconds=read_s - started_s,
            decode_seconds=ended_s - read_s,
            forwards=forwards,
        )


class _Text:
    """Tokens of a prompt and its answer, with the latest place after each n-gram."""

    def __init__(self, prompt: Sequence[int], grams: Sequence[int]) -> None:
        self._grams = grams
        self._after: dict[tuple[int, ...], int] = {}
        self.tokens: list[int] = []
        for token in prompt:
            self.add(token)

    def add(self, token: int) -> None:
        """Append a token; its place follows the n-grams that ended before it."""
        for length in self._grams:
            if len(self.tokens) >= length:
                self._after[tuple(self.tokens[-length:])] = len(self.tokens)
        self.tokens.append(token)

    def continuation(self, most: int) -> list[int]:
        """Return up to `most` tokens that followed the longest n-gram that ends the text."""
        for length in self._grams:
            start = self._after.get(tuple(self.tokens[-length:]))
            if start is not None:
                return self.tokens[start : start + most]
        return []


def llama_cpp_peers(folder: Path, threads: int, never_id: int, kinds: Iterable[str] = tuple(FORMATS)) -> list[LlamaCpp]:
    """Return llama.cpp with the model in `folder` in some formats. Raises a `PeerUnavailableError` with the reason.

    The files are made once and kept in the cache. F16 is written from the weights; llama.cpp quantises the others.
    """
    _api()
    return [LlamaCpp(quantised_file(folder, kind), kind, threads, never_id) for kind in kinds]


def format_of(bits: int) -> str:
    """Return the one of `FORMATS` with `bits` bits."""
    return next(kind for kind, kind_bits in FORMATS.items() if kind_bits == bits)


def bits_of(file: Path) -> int:
    """Return the bits of most weights of a .gguf file, by its header. Raises a `PeerUnavailableError`."""
    value = GGUFFile(file).value("general.file_type")
    names = {kind.value: kind.name for kind in gguf.LlamaFileType}
    bits = re.search(r"\d+", names.get(value, ""))
    if bits is None:
        raise PeerUnavailableError(f"{file.name} has general.file_type {value}, whose bits are unknown")
    return int(bits[0])


def lookup_peers(folder: Path, threads: int, never_id: int, kind: str = "F16") -> tuple[LlamaCpp, LlamaCppLookup]:
    """Return llama.cpp with the model in `folder` in one of `FORMATS`, without and with prompt lookup.

    Raises a `PeerUnavailableError` with the reason.
    """
    _api()
    file = quantised_file(folder, kind)
    plain, lookup = LlamaCpp(file, kind, threads, never_id), LlamaCppLookup(file, kind, threads, never_id)
    lookup.name += " lookup"
    return plain, lookup


def quantised_file(folder: Path, kind: str) -> Path:
    """Return the .gguf file of the model in `folder` in one of `FORMATS`, made by llama.cpp from F16."""
    digest = folder_digest(folder)
    f16_file = _kept(f"{digest}.F16.gguf", partial(write_gguf, folder))
    return f16_file if kind == "F16" else _kept(f"{digest}.{kind}.gguf", partial(_quantise, f16_file, kind))


def _kept(name: str, write: Callable[[Path], None]) -> Path:
    def make(file: Path) -> None:
        unfinished = file.with_name(f".{file.name}.0.partial")
        write(unfinished)
        unfinished.rename(file)

    return made_once(name, make)


def _quantise(f16_file: Path, kind: str, file: Path) -> None:
    api = _api()
    settings = api.llama_model_quantize_default_params()
    settings.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if api.llama_model_quantize(str(f16_file).encode(), str(file).encode(), ctypes.byref(settings)):
        raise PeerUnavailableError(f"llama.cpp could not quantise {f16_file} to {kind}")


def _api() -> Any:
    """Return llama.cpp's interface, started and with logging off."""
    try:
        from llama_cpp import llama_cpp
    except ImportError as error:
        raise PeerUnavailableError(f"not installed: {INSTALL}") from error
    _start(llama_cpp)
    return llama_cpp


@cache
def _start(api: Any) -> Any:
    """Start llama.cpp once and return its log callback, which must not be garbage-collected."""
    silent = api.llama_log_callback(lambda _level, _text, _data: None)
    api.llama_log_set(silent, ctypes.c_void_p(0))
    api.llama_backend_init()
    return silent
