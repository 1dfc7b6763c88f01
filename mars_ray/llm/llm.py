"""`LLM`: answer a list of prompts in this process."""

import sys
from collections.abc import Sequence
from typing import Self

from transformers import PreTrainedTokenizerBase

from mars_ray.adapter.card import resolve_adapter, unnamed
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.load import load_engine
from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.engine.grammar.library import check_grammar
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import DEFAULT_OPTIONS, EngineOptions
from mars_ray.engine.request import Request, SamplingParams
from mars_ray.llm.outputs import RequestCollector, RequestOutput
from mars_ray.llm.requests import (
    Conversation,
    Prompt,
    Schema,
    as_conversations,
    as_prompts,
    encode_conversation,
    encode_prompt,
    make_requests,
)
from mars_ray.model.dtype import DtypeOrAuto
from mars_ray.model.resolve import resolve_model
from mars_ray.progress import ProgressLine


class LLM:
    """A model, and an engine that decodes several tokens per forward with it. Not thread-safe.

    `model` is "bundled", "smollm2", a Hugging Face folder, a .gguf file or a name on a hub. `adapter` is one that was
    trained for it: "smollm2", a folder, or a name on a hub; the model looks ahead with it, and stays itself. `dtype` is
    "auto", "float32" or "bfloat16". `options` are the sizes of the engine; by default they follow from the model and
    the free memory. Raises `ModelError` for a model that cannot be loaded, `AdapterError` for one of another model,
    and `ConfigError` for sizes the engine cannot have.
    """

    def __init__(
        self,
        model: str = "bundled",
        *,
        adapter: str | None = None,
        dtype: DtypeOrAuto = "auto",
        options: EngineOptions = DEFAULT_OPTIONS,
    ) -> None:
        found = resolve_adapter(adapter)
        folder = resolve_model(model)
        self.default_sampling_params = SamplingParams(**generation_defaults(folder))
        """How prompts without sampling parameters are sampled: as the model's generation_config.json says."""
        self.engine, checkpoint, self.dtype = load_engine(folder, dtype, options, unnamed(found))
        self.tokenizer = checkpoint.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        threshold: float | None = None,
        mode: Mode | str = Mode.THRESHOLD,
        schema: Schema | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Continue one prompt or several, and return what came of each in their order.

        A prompt is a text or a sequence of token ids. `threshold` is the confidence that a token ahead needs: at 1,
        the default, each is verified and the answers are those of one token at a time; a lower one accepts tokens
        without verifying them, which is faster where positions of a forward are cheap. `mode` is "threshold", "exact"
        or "ar" (one token at a time). `schema` is a JSON schema that every answer holds to.
        `progress` shows how far the work is; by default it does so on a terminal.

        Raises `RequestError` before any work for a prompt or a value that cannot be served. What fails in the middle
        of its answer ends with the finish reason "error", and stops no other.
        """
        encoded = [encode_prompt(self.tokenizer, prompt) for prompt in as_prompts(prompts)]
        return self._answer(
            make_requests(
                encoded,
                sampling_params,
                threshold=threshold,
                mode=mode,
                schema=schema,
                default=self.default_sampling_params,
            ),
            progress,
        )

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        threshold: float | None = None,
        mode: Mode | str = Mode.THRESHOLD,
        schema: Schema | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, and return what came of each in their order.

        A conversation is a list of messages as OpenAI's chat API has them, or the text of a user's only message. The
        rest is as for `generate`. Raises `BadRecordError` for a conversation that the chat template refuses, and
        `ModelError` for a model without a chat template.
        """
        encoded = [encode_conversation(self.tokenizer, conversation) for conversation in as_conversations(messages)]
        return self._answer(
            make_requests(
                encoded,
                sampling_params,
                threshold=threshold,
                mode=mode,
                schema=schema,
                default=self.default_sampling_params,
            ),
            progress,
        )

    def close(self) -> None:
        """Stop what compiles in the background."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, requests: list[Request], progress: bool | None) -> list[RequestOutput]:
        for request in requests:
            self.engine.limits.check(request)
            if request.sampling.grammar is not None:
                check_grammar(request.sampling.grammar)
        if progress is None:
            progress = sys.stderr.isatty()
        if not progress:
            return answer_all(self.engine, self.tokenizer, requests, None)
        with ProgressLine("answers", total=len(requests)) as line:
            return answer_all(self.engine, self.tokenizer, requests, line)


def answer_all(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, requests: Sequence[Request], progress: ProgressLine | None
) -> list[RequestOutput]:
    """Return the answers to requests in their order; those still running are cancelled when it is interrupted."""
    collectors = {request.id: RequestCollector(request, tokenizer) for request in requests}
    finished = tokens = forwards = 0
    try:
        for chunks in run_steps(engine, requests):
            for chunk in chunks:
                collector = collectors[chunk.request_id]
                collector.add(chunk)
                finished += collector.finished
                if chunk.finished:
                    tokens, forwards = tokens + chunk.finished.tokens, forwards + chunk.finished.forwards
            if progress and forwards:
                progress.update(finished, {"tokens": f"{tokens:,}", "per forward": f"{tokens / forwards:.2f}"})
    finally:
        for name, collector in collectors.items():
            if not collector.finished:
                engine.cancel(name)
        while engine.busy:
            engine.step()
    return [collector.output() for collector in collectors.values()]
