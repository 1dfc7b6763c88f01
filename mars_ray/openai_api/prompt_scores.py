"""Prompts in responses: OpenAI's `echo` of text and log-probabilities, and vLLM's `prompt_logprobs`.

In:    a prompt, and the log-probabilities of its tokens from the second on.
Out:   lists with one entry per token of the prompt; the first is null, because nothing precedes the first token.
Never: limits the number of entries, see `RequestLimits.prompt_scores`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from openai.types.completion_choice import Logprobs

from mars_ray.engine.chunk import Chunk, TokenLogprobs
from mars_ray.openai_api.protocol import ChatCompletionRequest, CompletionRequest

LEAST_LOGPROB = -9999.0
"""Value sent in place of minus infinity, which JSON cannot represent. OpenAI sends the same value for impossible
tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredPrompt:
    """Parts of a prompt that a response shows."""

    tokens: Sequence[int]
    echo: str = ""
    """Text to begin the answer with."""
    starts: Sequence[int] = ()
    """Index in `echo` of the character at which the text of each token begins. Empty unless the log-probabilities are
    echoed too."""
    listed: int = 0
    """Number of most likely tokens that the echoed log-probabilities list."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens that vLLM's field lists; None leaves the field out."""

    def before(self, answer: Logprobs | None, part: Chunk, text_of: Callable[[int], str]) -> Logprobs | None:
        """Return the log-probabilities of the echoed prompt and of an answer, whose text begins after the echo.

        After a prompt with log-probabilities even a stop token, which has no text, gets an entry, as in vLLM: clients
        that score prompts count on one entry per token.
        """
        if not self.starts:
            if answer and answer.text_offset:
                answer.text_offset = [start + len(self.echo) for start in answer.text_offset]
            return answer
        pairs = list(zip(self.tokens[1:], part.prompt_logprobs, strict=True))
        answer = answer or Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        silent = [pair for pair in zip(part.tokens, part.logprobs, strict=True) if pair[1].start is None]
        top, after = (
            [likeliest(token, score, text_of, self.listed) for token, score in scored] for scored in (pairs, silent)
        )
        ends = len(self.echo) + len(part.text)
        return Logprobs.construct(
            tokens=[*map(text_of, self.tokens), *(answer.tokens or ()), *(text_of(token) for token, _ in silent)],
            token_logprobs=[
                None,
                *(finite(score.chosen) for _, score in pairs),
                *(answer.token_logprobs or ()),
                *(finite(score.chosen) for _, score in silent),
            ],
            top_logprobs=[None, *top, *(answer.top_logprobs or ()), *after],
            text_offset=[
                *self.starts,
                *(start + len(self.echo) for start in answer.text_offset or ()),
                *(ends for _ in silent),
            ],
        )

    def field(self, part: Chunk, text_of: Callable[[int], str]) -> dict[str, Any]:
        """Return vLLM's field `prompt_logprobs`, or no field if it was not asked for.

        The rank of the prompt's token is null if it is not among the most likely ones.
        """
        if self.prompt_logprobs is None:
            return {}
        entries: list[dict[str, Any] | None] = [None]
        for token, score in zip(self.tokens[1:], part.prompt_logprobs, strict=True):
            likely = score.top[: self.prompt_logprobs]
            ranked: dict[int, tuple[float, int | None]] = {
                top: (logprob, rank) for rank, (top, logprob) in enumerate(likely, start=1)
            }
            ranked.setdefault(token, (score.chosen, None))
            entries.append(
                {
                    str(candidate): {"logprob": finite(logprob), "rank": rank, "decoded_token": text_of(candidate)}
                    for candidate, (logprob, rank) in ranked.items()
                }
            )
        return {"prompt_logprobs": entries}


def shown_prompt(body: ChatCompletionRequest, tokens: Sequence[int]) -> ScoredPrompt | None:
    """Return what the response to a conversation shows of its prompt; None if it shows nothing."""
    count = body.prompt_logprobs
    return None if count is None else ScoredPrompt(tokens=tokens, prompt_logprobs=count)


def shown_prompts(
    body: CompletionRequest, prompts: Sequence[Sequence[int]], bytes_of: Callable[[int], bytes]
) -> list[ScoredPrompt]:
    """Return the parts of its prompts that a response shows; empty if it shows none."""
    if not body.echo and body.prompt_logprobs is None:
        return []
    shown = []
    for number, tokens in enumerate(prompts):
        text = body.texts[number] if body.texts else None
        echo, starts = text_and_starts(text, tokens, bytes_of) if body.echo else ("", ())
        shown.append(
            ScoredPrompt(
                tokens=tokens,
                echo=echo,
                starts=starts if body.shows_logprobs else (),
                listed=body.logprobs or 0,
                prompt_logprobs=body.prompt_logprobs,
            )
        )
    return shown


def text_and_starts(
    text: str | None, tokens: Sequence[int], bytes_of: Callable[[int], bytes]
) -> tuple[str, tuple[int, ...]]:
    """Return the text of a prompt, and the index of the character at which the text of each token begins.

    `text` is None for a prompt that was given as token ids. A token that is not part of the text, such as one for the
    beginning of a sequence, begins where the next one does.
    """
    pieces = [bytes_of(token) for token in tokens]
    data = b"".join(pieces) if text is None else text.encode()
    position = characters = 0
    starts = []
    for piece in pieces:
        starts.append(characters)
        if position == 0 and not data.startswith(piece):
            piece = piece.removeprefix(b" ")  # some tokenizers begin each text with a space
        if data.startswith(piece, position):
            position += len(piece)
            characters += sum(byte & 0xC0 != 0x80 for byte in piece)  # continuation bytes begin no character
    return data.decode(errors="replace"), tuple(starts)


def likeliest(
    token: int, score: TokenLogprobs, text_of: Callable[[int], str], count: int | None = None
) -> dict[str, float]:
    """Return the log-probabilities of the `count` most likely tokens and of the token itself, by their texts."""
    by_text = {text_of(token): finite(score.chosen)}
    for top, logprob in score.top[:count]:
        by_text.setdefault(text_of(top), finite(logprob))
    return by_text


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent, with `LEAST_LOGPROB` for minus infinity."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
