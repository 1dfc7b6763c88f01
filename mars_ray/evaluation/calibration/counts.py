"""Count what answers in several ways of decoding gave: tokens, forwards, tokens that agree, right answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mars_ray.adapter.folder import Adapter
from mars_ray.data.tasks import is_right_answer
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.evaluation.calibration.answers import answer_prompts
from mars_ray.evaluation.calibration.prompts import CalibrationPrompt
from mars_ray.evaluation.scoring.agreement import agreed_tokens
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.progress import ProgressLine


@dataclass(frozen=True, slots=True)
class CalibrationCounts:
    """What was counted of some answers."""

    examples: int
    tokens: int
    forwards: int
    agreed: int
    """Tokens that autoregressive decoding chooses too, given what stands before them."""
    right: int
    """Right answers; 0 where nothing judges them."""

    @property
    def tokens_per_forward(self) -> float:
        """All tokens over all forwards."""
        return self.tokens / self.forwards

    @property
    def agreement(self) -> float:
        """Share of the tokens that autoregressive decoding chooses too."""
        return self.agreed / self.tokens

    @property
    def accuracy(self) -> float:
        """Share of the answers that are right."""
        return self.right / self.examples


def total_of(counts: Iterable[CalibrationCounts]) -> CalibrationCounts:
    """Return the count of all answers together."""
    every = list(counts)
    return CalibrationCounts(
        examples=sum(each.examples for each in every),
        tokens=sum(each.tokens for each in every),
        forwards=sum(each.forwards for each in every),
        agreed=sum(each.agreed for each in every),
        right=sum(each.right for each in every),
    )


def count_answers(
    checkpoint: Checkpoint,
    prompts: Sequence[CalibrationPrompt],
    decodes: Sequence[DecodeParams],
    sampling: SamplingParams,
    adapter: Adapter | None = None,
) -> list[list[CalibrationCounts]]:
    """Return for each way of decoding the count of each prompt. Raises `DataError` as `answer_prompts` does."""
    with ProgressLine("decode", total=len(prompts) * len(decodes)) as progress:
        answers = answer_prompts(checkpoint, prompts, decodes, sampling, progress, adapter)
    different = list({(each.request.prompt, tuple(each.tokens)) for of_prompt in answers for each in of_prompt})
    with ProgressLine("compare with autoregressive decoding", total=len(different)) as progress:
        counts = agreed_tokens(checkpoint.network, different, checkpoint.mask_id, progress)
    agreed = dict(zip(different, counts, strict=True))
    return [
        [
            CalibrationCounts(
                examples=1,
                tokens=len(answer.tokens),
                forwards=answer.forwards,
                agreed=agreed[answer.request.prompt, tuple(answer.tokens)],
                right=int(is_right(prompt, answer.text)),
            )
            for prompt, answer in zip(prompts, of_way, strict=True)
        ]
        for of_way in zip(*answers, strict=True)
    ]


def is_right(prompt: CalibrationPrompt, text: str) -> bool:
    """Say whether the verifier of its family takes an answer; no where there is none."""
    return prompt.example is not None and is_right_answer(prompt.example.family, prompt.example.answer, text)
