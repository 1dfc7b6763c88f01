"""The prompts that are raced: one for each kind of work, from what is hard to foresee to what is easy."""

from dataclasses import dataclass

from mars_ray.data.records import Message


@dataclass(frozen=True, slots=True)
class RacePrompt:
    """What is asked, and which kind of work it stands for."""

    workload: str
    question: str
    example: tuple[str, str] | None = None
    """A question of the kind and its answer, said before."""

    @property
    def messages(self) -> list[Message]:
        """The conversation up to the question."""
        said = zip(("user", "assistant"), self.example or (), strict=False)
        return [
            *({"role": role, "content": content} for role, content in said),
            {"role": "user", "content": self.question},
        ]


PROMPTS = (
    RacePrompt("general", "How do plants make their food?"),
    RacePrompt(
        "reasoning steps",
        "A train travels 60 miles in the first hour and 45 miles in the second hour. How far does it travel in all? "
        "Think step by step.",
    ),
    RacePrompt(
        "structure",
        "As a JSON array: Ada is 36 and lives in London. Alan is 41 and lives in Manchester. Grace is 25 and lives in "
        "Boston.",
        (
            "As a JSON array: Nina is 29 and lives in Oslo. Omar is 51 and lives in Cairo.",
            '[\n  {"name": "Nina", "age": 29, "city": "Oslo"},\n  {"name": "Omar", "age": 51, "city": "Cairo"}\n]',
        ),
    ),
)
