"""What each threshold gives on some questions: tokens per forward, agreement, accuracy, each with its spread.

In:    a checkpoint, whose attention an engine replaces; questions, thresholds.
Out:   a point for each threshold.
Never: reads or writes a file.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from mars_ray.data.tasks import FAMILIES, verify
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.evaluate.agreement import agreed_tokens
from mars_ray.evaluate.answers import Answer, answer_all
from mars_ray.evaluate.questions import Question
from mars_ray.model.card import CalibrationPoint, FamilyPoint
from mars_ray.model.checkpoint import Checkpoint
from mars_ray.progress import ProgressLine


@dataclass(slots=True)
class _Tally:
    """Of some answers."""

    examples: int = 0
    tokens: int = 0
    forwards: int = 0
    agreed: int = 0
    right: int = 0

    def add(self, other: "_Tally") -> None:
        self.examples += other.examples
        self.tokens += other.tokens
        self.forwards += other.forwards
        self.agreed += other.agreed
        self.right += other.right

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards

    @property
    def agreement(self) -> float:
        return self.agreed / self.tokens

    @property
    def accuracy(self) -> float:
        return self.right / self.examples


_ByFamily = Mapping[str, _Tally]


def curve_of(
    checkpoint: Checkpoint,
    questions: Sequence[Question],
    thresholds: Sequence[float],
    sampling: SamplingParams,
    data: str,
) -> tuple[CalibrationPoint, ...]:
    """Measure every threshold; `data` is the name the questions go by."""
    with ProgressLine("decode", total=len(questions) * len(thresholds)) as progress:
        decodes = [DecodeParams(threshold=threshold) for threshold in thresholds]
        answers = answer_all(checkpoint, questions, decodes, sampling, progress)
    # Most thresholds give most answers alike.
    different = list({(each.prompt, tuple(each.tokens)) for of_question in answers for each in of_question})
    with ProgressLine("compare with autoregressive decoding", total=len(different)) as progress:
        counts = agreed_tokens(checkpoint.network, different, checkpoint.mask_id, progress)
    agreed = dict(zip(different, counts, strict=True))
    points = []
    for rank, threshold in enumerate(thresholds):
        tallies: dict[int, dict[str, _Tally]] = defaultdict(lambda: defaultdict(_Tally))
        for question, of_question in zip(questions, answers, strict=True):
            answer = of_question[rank]
            family = question.example.family if question.example else ""
            tally = _tally(question, answer, agreed[answer.prompt, tuple(answer.tokens)])
            tallies[question.sample][family].add(tally)
        points.append(_point(threshold, list(tallies.values()), data))
    return tuple(points)


def _tally(question: Question, answer: Answer, agreed: int) -> _Tally:
    right = question.example is not None and verify(question.example.family, question.example.answer, answer.text)
    return _Tally(1, len(answer.tokens), answer.forwards, agreed, int(right))


def _point(threshold: float, samples: Sequence[_ByFamily], data: str) -> CalibrationPoint:
    families = [name for name in FAMILIES if any(name in sample for sample in samples)]
    whole = {name: _sum(sample[name] for sample in samples if name in sample) for name in families or [""]}
    total = _sum(whole.values())

    def spread(figure: Callable[[_ByFamily], float]) -> float | None:
        return stdev(map(figure, samples)) if len(samples) > 1 else None

    return CalibrationPoint(
        threshold=threshold,
        tokens_per_forward=total.tokens_per_forward,
        tokens_per_forward_std=spread(lambda sample: _sum(sample.values()).tokens_per_forward),
        agreement=total.agreement,
        agreement_std=spread(lambda sample: _sum(sample.values()).agreement),
        accuracy=_accuracy(whole) if families else None,
        accuracy_std=spread(_accuracy) if families else None,
        examples=total.examples,
        tokens=total.tokens,
        seeds=len(samples),
        data=data,
        by_family={
            name: FamilyPoint(
                examples=whole[name].examples,
                tokens_per_forward=whole[name].tokens_per_forward,
                accuracy=whole[name].accuracy,
            )
            for name in families
        },
    )


def _sum(tallies: Iterable[_Tally]) -> _Tally:
    total = _Tally()
    for tally in tallies:
        total.add(tally)
    return total


def _accuracy(by_family: _ByFamily) -> float:
    """Every family counts alike."""
    return fmean(tally.accuracy for tally in by_family.values())
