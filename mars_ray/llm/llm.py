"""`LLM`: answer a list of prompts in this process."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Self

from mars_ray.adapter.card import resolve_adapter, resolve_adapters, unnamed
from mars_ray.engine.core.adapters import LoadedAdapter
from mars_ray.engine.core.load import best_device, start_engine
from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.engine.grammar.library import check_grammar
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import options_by_name
from mars_ray.engine.request import DecodeParams, Request, SamplingParams, check_adapter
from mars_ray.errors import AdapterError, RequestError
from mars_ray.llm.outputs import RequestCollector, RequestOutput
from mars_ray.llm.requests import (
    Conversation,
    Schema,
    TextOrTokens,
    ToolChoice,
    Tools,
    as_conversations,
    decode_params,
    encode_conversations,
    encode_prompts,
    make_requests,
)
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.model.folder import open_model
from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.progress import ProgressLine


class LLM:
    """A model with an engine in this process. Not thread-safe.

    `model` is "bundled", "smollm2", a Hugging Face folder, a .gguf file or a name on a hub. `adapter` is "smollm2", a
    folder, or a name on a hub. An adapter must have been trained for this model; it proposes tokens and leaves the
    model unchanged. `dtype` is "auto", "float32" or "bfloat16". Further arguments are the options of `EngineOptions`
    by name, such as `quantize="int8"`, `max_num_seqs=16` or `engine="vllm"`. Their defaults depend on the model and the
    free memory. Raises `ModelError` for a model that cannot be loaded, `AdapterError` for an adapter that does not fit,
    and `ConfigError` for an unknown option and for a value that the engine does not support.
    """

    def __init__(
        self,
        model: str | Path = "bundled",
        *,
        adapter: str | Path | None = None,
        dtype: DtypeOrAuto = "auto",
        **options: Any,
    ) -> None:
        engine_options = options_by_name(options)
        adapter_folder = resolve_adapter(adapter)
        resolved = open_model(model, dtype, best_device())
        self.dtype = resolved.dtype
        self.default_sampling_params = SamplingParams(**generation_defaults(resolved.folder))
        """Sampling parameters from the model's generation_config.json, used if a call passes none."""
        self._adapter_memory_gib = engine_options.adapter_memory_gib
        self._adapters: dict[str, LoadedAdapter] = {}
        self.engine, self.tokenizer = start_engine(resolved, engine_options, unnamed(adapter_folder))

    def set_adapters(self, adapters: Mapping[str, str | Path]) -> None:
        """Have exactly these adapters with a name: folders, URLs or hub names, keyed by the names that `adapter` takes.

        All are loaded now and stay in memory, so together they must fit into `adapter_memory_gib`. Raises
        `AdapterError` for the first one that cannot be used; then nothing has changed.
        """
        loaded: dict[str, LoadedAdapter] = {}
        for name, folder in resolve_adapters(None, adapters).items():
            assert name is not None
            try:
                loaded[name] = self.engine.load_adapter(folder)
            except AdapterError as error:
                raise AdapterError(f"adapter {name!r}: {error}", adapter=name) from error
            gib = sum(adapter.nbytes for adapter in loaded.values()) / 2**30
            if self._adapter_memory_gib is not None and gib > self._adapter_memory_gib:
                raise AdapterError(
                    f"the adapters up to {name!r} take {gib:.3f} GiB, but adapter_memory_gib is "
                    f"{self._adapter_memory_gib}. Raise it, or set fewer adapters.",
                    adapter=name,
                )
        self.engine.set_adapters(loaded)
        self._adapters = loaded

    def generate(
        self,
        prompts: TextOrTokens | Iterable[TextOrTokens],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        threshold: float | None = None,
        mode: Mode | str = Mode.THRESHOLD,
        adapter: str | None = None,
        schema: Schema | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or several, and return the outputs in the same order.

        A prompt is a text or token ids. Several prompts are a list, a generator, an array of NumPy or torch, or a
        Series of pandas. `threshold` is what a token ahead must reach to be kept though the model may choose another.
        At 1, the default, the answers are the same as when decoding one token at a time. A lower threshold needs fewer
        forwards. `mode` is "threshold", "exact" or "ar" (one token at a time). `adapter` is a name that `set_adapters`
        has set. `schema` is a JSON schema that every answer follows. `progress` shows a progress bar; None shows one
        only on a terminal.

        Raises `RequestError`, before any work, for a prompt or a value that cannot be served. An answer that fails
        halfway has the finish reason "error"; the other answers continue.
        """
        decode = decode_params(mode, threshold, adapter)
        return self._answer(encode_prompts(self.tokenizer, prompts), [], sampling_params, decode, schema, progress)

    def chat(
        self,
        messages: Conversation | Iterable[Conversation],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        threshold: float | None = None,
        mode: Mode | str = Mode.THRESHOLD,
        adapter: str | None = None,
        schema: Schema | None = None,
        tools: Tools | None = None,
        tool_choice: ToolChoice = "auto",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, and return the outputs in the same order.

        A conversation is a list of messages in the format of OpenAI's chat API, or the text of a single user message.
        `tools` and `tool_choice` are as in that API; the outputs then have `tool_calls`. The other parameters are the
        same as for `generate`. Raises `BadRecordError` for a conversation that the chat template refuses, `ModelError`
        for a model without a chat template, and `RequestError` for messages and tools that cannot be used.
        """
        decode = decode_params(mode, threshold, adapter)
        prompts, plans = encode_conversations(self.tokenizer, as_conversations(messages), tools, tool_choice)
        return self._answer(prompts, plans, sampling_params, decode, schema, progress)

    def close(self) -> None:
        """Leave the network without the engine's hooks. Call no other method afterwards."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(
        self,
        prompts: list[tuple[int, ...]],
        plans: Sequence[AnswerPlan],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None,
        decode: DecodeParams,
        schema: Schema | None,
        progress: bool | None,
    ) -> list[RequestOutput]:
        default = self.default_sampling_params
        requests = make_requests(prompts, sampling_params, decode, schema, default=default, plans=plans)
        check_adapter(decode.adapter, self._adapters)
        for request in requests:
            self.engine.limits.check(request)
            if request.sampling.grammar is not None:
                check_grammar(request.sampling.grammar)
        if progress is None:
            progress = sys.stderr.isatty()
        elif not isinstance(progress, bool):
            raise RequestError(f"progress is {shortened(progress)}; it must be True, False or None.")
        if not progress:
            return self._decode(requests, plans, None)
        with ProgressLine("answers", total=len(requests)) as line:
            return self._decode(requests, plans, line)

    def _decode(
        self, requests: Sequence[Request], plans: Sequence[AnswerPlan], progress: ProgressLine | None
    ) -> list[RequestOutput]:
        """Return the outputs in the order of `requests`. If interrupted, cancel the running requests."""
        collectors = {
            request.id: RequestCollector(request, self.tokenizer, plan)
            for request, plan in zip_longest(requests, plans)
        }
        finished = tokens = forwards = 0
        try:
            for chunks in run_steps(self.engine, requests):
                for chunk in chunks:
                    collector = collectors[chunk.request_id]
                    collector.add(chunk)
                    finished += collector.finished
                    if chunk.finished:
                        tokens += chunk.finished.tokens
                        forwards += chunk.finished.forwards
                if progress and forwards:
                    progress.update(finished, {"tokens": f"{tokens:,}", "per forward": f"{tokens / forwards:.2f}"})
        finally:
            for name, collector in collectors.items():
                if not collector.finished:
                    self.engine.cancel(name)
            for _ in run_steps(self.engine):
                pass
        return [collector.output() for collector in collectors.values()]
