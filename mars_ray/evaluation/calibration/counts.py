"""Answer prompts with several settings, and count tokens, forwards, agreeing tokens and correct answers."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mars_ray.adapter.card import unnamed
from mars_ray.adapter.folder import Adapter
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.tasks import is_right_answer
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import OfflineResult, decode_all
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import BadRecordError, DataError, RequestError
from mars_ray.evaluation.calibration.prompts import CalibrationPrompt
from mars_ray.evaluation.scoring.agreement import agreed_tokens
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.progress import ProgressLine


@dataclass(frozen=True, slots=True)
class CalibrationCounts:
    """Counts over a set of answers."""

    examples: int
    tokens: int
    forwards: int
    agreed: int
    """Number of tokens that autoregressive decoding would also choose after the same prefix."""
    right: int
    """Number of correct answers; 0 if the prompts have no verifier."""

    @property
    def tokens_per_forward(self) -> float:
        """Tokens divided by forwards."""
        return self.tokens / self.forwards

    @property
    def agreement(self) -> float:
        """Share of the tokens that autoregressive decoding would also choose."""
        return self.agreed / self.tokens

    @property
    def accuracy(self) -> float:
        """Share of the answers that are correct."""
        return self.right / self.examples


def total_of(counts: Iterable[CalibrationCounts]) -> CalibrationCounts:
    """Return the sum of all counts."""
    parts = list(counts)
    return CalibrationCounts(
        examples=sum(count.examples for count in parts),
        tokens=sum(count.tokens for count in parts),
        forwards=sum(count.forwards for count in parts),
        agreed=sum(count.agreed for count in parts),
        right=sum(count.right for count in parts),
    )


def count_answers(
    checkpoint: Checkpoint,
    prompts: Sequence[CalibrationPrompt],
    decodes: Sequence[DecodeParams],
    sampling: SamplingParams,
    adapter: Adapter | None = None,
) -> list[list[CalibrationCounts]]:
    """Return one list per entry of `decodes`, with the counts of each prompt.

    Raises `DataError` in the same cases as `answer_prompts`.
    """
    with ProgressLine("decode", total=len(prompts) * len(decodes)) as progress:
        answers = answer_prompts(checkpoint, prompts, decodes, sampling, progress, adapter)
    distinct = list({(answer.request.prompt, tuple(answer.tokens)) for results in answers for answer in results})
    with ProgressLine("compare with autoregressive decoding", total=len(distinct)) as progress:
        counts = agreed_tokens(checkpoint.network, distinct, checkpoint.mask_id, progress)
    agreed = dict(zip(distinct, counts, strict=True))
    return [
        [
            CalibrationCounts(
                examples=1,
                tokens=len(answer.tokens),
                forwards=answer.forwards,
                agreed=agreed[answer.request.prompt, tuple(answer.tokens)],
                right=int(is_right(prompt, answer.text)),
            )
            for prompt, answer in zip(prompts, results, strict=True)
        ]
        for results in zip(*answers, strict=True)
    ]


def answer_prompts(
    checkpoint: Checkpoint,
    prompts: Sequence[CalibrationPrompt],
    decodes: Sequence[DecodeParams],
    sampling: SamplingParams,
    progress: ProgressLine,
    adapter: Adapter | None = None,
) -> list[list[OfflineResult]]:
    """Return the answers to each prompt, one for each entry of `decodes`.

    The block size is fixed (by default to the card's), so that answers do not depend on load or order. Raises
    `DataError`, before any work, for a prompt that the chat template refuses or that is too long.
    """
    options = EngineOptions(max_request_tokens=sampling.max_tokens)
    engine = Engine(checkpoint, options, adapters=unnamed(adapter))
    encoder = ChatEncoder(checkpoint.tokenizer)
    decodes = [replace(decode, block=decode.block or engine.block) for decode in decodes]
    encoded = [_encoded(prompt, encoder, engine, sampling) for prompt in prompts]
    results: dict[str, OfflineResult] = {}
    for decoded in decode_all(engine, _requests(encoded, sampling, decodes)):
        results[decoded.request.id] = decoded
        progress.update(len(results), {})
    return [[results[f"{number}/{rank}"] for rank in range(len(decodes))] for number in range(len(prompts))]


def _encoded(
    prompt: CalibrationPrompt, encoder: ChatEncoder, engine: Engine, sampling: SamplingParams
) -> tuple[int, ...]:
    try:
        tokens = tuple(encoder.prompt(prompt.messages))
        engine.limits.check(Request(id=prompt.name, prompt=tokens, sampling=sampling))
    except (BadRecordError, RequestError) as error:
        raise DataError(f"{prompt.name}: {error}") from None
    return tokens


def _requests(
    prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, decodes: Sequence[DecodeParams]
) -> Iterator[Request]:
    """Yield all requests for a prompt consecutively, so that they share the prompt in the cache."""
    for number, prompt in enumerate(prompts):
        for rank, decode in enumerate(decodes):
            yield Request(id=f"{number}/{rank}", prompt=prompt, sampling=sampling, decode=decode)


def is_right(prompt: CalibrationPrompt, text: str) -> bool:
    """Return True if the verifier of the prompt's family accepts the answer, and False if there is no verifier."""
    return prompt.example is not None and is_right_answer(prompt.example.family, prompt.example.answer, text)
