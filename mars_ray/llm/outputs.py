"""What `LLM` and `AsyncLLM` return for a prompt, under the names vLLM has for it."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from mars_ray.engine.chunk import Chunk, FinishReason, TokenLogprobs
from mars_ray.engine.request import Request
from mars_ray.errors import MarsRayError


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    """Which of the n answers to the prompt, from 0."""
    text: str
    token_ids: tuple[int, ...]
    """The tokens, with the stop token that ended the answer, which is not in the text."""
    finish_reason: FinishReason
    forwards: int
    """Runs of the network that gave at least one of the tokens."""
    logprobs: tuple[TokenLogprobs, ...]
    """Log-probabilities of each token, when asked for."""
    error: MarsRayError | None
    """What went wrong, where the finish reason is "error"; text and tokens are then what there was."""

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that one run of the network gave, in the mean; 0 for an answer without tokens."""
        return len(self.token_ids) / self.forwards if self.forwards else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt. `text` and what follows are those of the first of them."""

    request_id: str
    """Tells requests of this process from one another."""
    prompt: str
    """The text of the prompt's tokens, special tokens included: of a conversation what the chat template made of it."""
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    """The answers, as many as `SamplingParams.n`, in the order of their index."""
    finished: bool = True
    """Always true, as in vLLM: what is returned has ended."""

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens of the first answer."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """How the first answer ended: "stop", "length" or "error"."""
        return self.outputs[0].finish_reason

    @property
    def tokens_per_forward(self) -> float:
        """Tokens per run of the network, of the first answer."""
        return self.outputs[0].tokens_per_forward


class RequestCollector:
    """Puts the chunks of one request together."""

    def __init__(self, request: Request, tokenizer: PreTrainedTokenizerBase) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._chunks: list[list[Chunk]] = [[] for _ in range(request.sampling.n)]
        self._running = request.sampling.n

    def add(self, chunk: Chunk) -> None:
        """Take a chunk of any of the n answers."""
        self._chunks[chunk.index].append(chunk)
        self._running -= chunk.finished is not None

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return self._running == 0

    def output(self) -> RequestOutput:
        """Return the answers, once all have ended."""
        outputs = tuple(_completion(index, chunks) for index, chunks in enumerate(self._chunks))
        prompt = self._request.prompt
        return RequestOutput(
            request_id=self._request.id,
            prompt=self._tokenizer.decode(list(prompt)),
            prompt_token_ids=prompt,
            outputs=outputs,
        )


def _completion(index: int, chunks: list[Chunk]) -> CompletionOutput:
    finished = chunks[-1].finished
    assert finished is not None
    return CompletionOutput(
        index=index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.tokens),
        finish_reason=finished.reason,
        forwards=finished.forwards,
        logprobs=tuple(each for chunk in chunks for each in chunk.logprobs),
        error=finished.error,
    )
