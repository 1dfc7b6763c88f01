"""Small evaluations to score and to draw."""

from collections.abc import Sequence
from pathlib import Path

from mars_ray.evaluation.results import (
    EvaluationPlan,
    Metrics,
    PairedComparison,
    Results,
    SettingSpeed,
    SpeedMeasurement,
)
from mars_ray.evaluation.scorer import ScoredAnswer, Scores
from mars_ray.evaluation.tasks import Question, Task

SETTINGS = ("ar", "threshold 0.9")


def question(task: str = "a", number: int = 0, seed: int = 0, prompt: str = "why?") -> Question:
    messages = ({"role": "user", "content": prompt},)
    return Question(task=task, number=number, seed=seed, messages=messages, reference="so", match="exact")


def task_of(name: str, per_seed: Sequence[int]) -> Task:
    """A task with so many questions of each seed."""
    questions = [question(name, number, seed) for seed, count in enumerate(per_seed) for number in range(count)]
    return Task(name=name, questions=tuple(questions), max_tokens=8)


def answer(right: bool = True, tokens: int = 4, forwards: int = 2, agreed: int = 4, key: bytes = b"k") -> ScoredAnswer:
    return ScoredAnswer(
        right=right,
        tokens=tokens,
        forwards=forwards,
        agreed=agreed,
        key=key.ljust(16, b"."),
        accepted_lengths=(tokens,),
    )


def scores_of(tasks: Sequence[Task], block: int = 4) -> Scores:
    return Scores(tasks, SETTINGS, block)


def figures(accuracy: float, per_forward: float | None, paired: bool = True) -> Metrics:
    against = PairedComparison(difference=-0.01, low=-0.02, high=0.0, better=1, worse=3, p_value=0.625)
    return Metrics(
        examples=100,
        unanswered=0,
        right=int(100 * accuracy),
        accuracy=accuracy,
        accuracy_std=0.01,
        accuracy_low=accuracy - 0.02,
        accuracy_high=min(1.0, accuracy + 0.02),
        tokens=1000,
        forwards=500,
        tokens_per_forward=per_forward,
        tokens_per_forward_std=0.1,
        agreement=0.999,
        agreement_std=None,
        same_answers=0.9,
        against_ar=against if paired else None,
    )


def results(tasks: Sequence[str] = ("a",), model: str = "m") -> Results:
    overall = {"ar": figures(0.9, 1.0, paired=False), "exact": figures(0.9, 3.0), "threshold 0.9": figures(0.88, 4.0)}
    speed = {
        name: SettingSpeed(tokens_per_s=1000.0 * place, tokens_per_s_std=10.0, rounds=(990.0, 1010.0))
        for place, name in enumerate(overall, start=1)
    }
    return Results(
        plan=EvaluationPlan(
            model=model,
            model_digest="0f",
            block=4,
            dtype="float32",
            adapter_digest=None,
            quantize=None,
            dtype_reason="that of the checkpoint",
            device="cpu",
            tasks=tuple(tasks),
            max_tokens=(8,) * len(tasks),
            seeds=2,
            questions=100,
            questions_digest="1e",
            settings=tuple(overall),
            temperature=0.0,
        ),
        overall=overall,
        tasks=dict.fromkeys(tasks, overall),
        stops={"exact": (1, 2, 3, 4), "threshold 0.9": (4, 3, 2, 1)},
        speed=SpeedMeasurement(
            prompts=64,
            machine={"cpu": "c", "gpu": None, "commit": "abc"},
            rows=8,
            device="cpu",
            threads=1,
            settings=speed,
        ),
    )


def references(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path
