"""Outputs of `LLM` and `AsyncLLM`, named as in vLLM."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mars_ray.engine.chunk import Chunk, FinishReason, TokenLogprobs
from mars_ray.engine.process.collector import joined_chunk
from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError
from mars_ray.openai_api.answer_parts import FunctionCall, PartedAnswer
from mars_ray.openai_api.answer_plan import AnswerPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    """Index of the answer among the n answers to the prompt, from 0."""
    text: str
    """Text of the answer; with tools, its content without reasoning and calls."""
    token_ids: tuple[int, ...]
    """Generated tokens, including the stop token, whose text is not part of `text`."""
    finish_reason: FinishReason
    forwards: int
    """Number of forwards that produced at least one token of this answer."""
    logprobs: tuple[TokenLogprobs, ...]
    """Log-probabilities of each token, if requested."""
    error: MarsRayError | None
    """The error, if the finish reason is "error"; text and tokens are then partial."""
    reasoning_content: str = ""
    """Text of the reasoning before the answer, if the call had tools."""
    tool_calls: tuple[FunctionCall, ...] = ()
    """Calls of tools."""

    @property
    def tokens_per_forward(self) -> float:
        """Mean tokens per forward; 0 for an answer without tokens."""
        return len(self.token_ids) / self.forwards if self.forwards else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt. The properties describe the first answer."""

    request_id: str
    """Identifier that is unique in this process."""
    prompt: str
    """Text of the prompt with special tokens; for a conversation, the output of the chat template."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    """The `SamplingParams.n` answers, in the order of their index."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens from the second on, if requested."""
    finished: bool = True
    """Always True; present for compatibility with vLLM."""

    @property
    def text(self) -> str:
        """Text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first answer."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Finish reason of the first answer: "stop", "length" or "error"."""
        return self.outputs[0].finish_reason

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per forward of the first answer."""
        return self.outputs[0].tokens_per_forward


class RequestCollector:
    """Builder of the output of one request from its chunks."""

    def __init__(self, request: Request, tokenizer: PreTrainedTokenizerBase, plan: AnswerPlan | None = None) -> None:
        self._request = request
        self._plan = plan
        self._tokenizer = tokenizer
        self._chunks: list[list[Chunk]] = [[] for _ in range(request.sampling.n)]
        self._running = request.sampling.n

    def add(self, chunk: Chunk) -> None:
        """Add a chunk that belongs to any of the n answers."""
        self._chunks[chunk.index].append(chunk)
        self._running -= chunk.finished is not None

    @property
    def finished(self) -> bool:
        """True once all answers have ended."""
        return self._running == 0

    def output(self) -> RequestOutput:
        """Return the output. Call this only after all answers have ended."""
        outputs = tuple(_completion(index, chunks, self._plan) for index, chunks in enumerate(self._chunks))
        prompt = self._request.prompt
        return RequestOutput(
            request_id=self._request.id,
            prompt=self._tokenizer.decode(list(prompt)),
            prompt_token_ids=prompt,
            outputs=outputs,
            prompt_logprobs=tuple(entry for chunk in self._chunks[0] for entry in chunk.prompt_logprobs),
        )


def _completion(index: int, chunks: list[Chunk], plan: AnswerPlan | None) -> CompletionOutput:
    answer = joined_chunk(chunks)
    finished = answer.finished
    assert finished is not None
    parts = PartedAnswer(answer.text) if plan is None else plan.parted(answer.text)
    return CompletionOutput(
        index=index,
        text=parts.content,
        token_ids=answer.tokens,
        finish_reason=finished.reason,
        forwards=finished.forwards,
        logprobs=answer.logprobs,
        error=finished.error,
        reasoning_content=parts.reasoning_content,
        tool_calls=tuple(parts.tool_calls),
    )
