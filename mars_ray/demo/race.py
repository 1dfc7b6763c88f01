"""Data of a race: one prompt, and the answer of each setting with the time of every chunk."""

from dataclasses import dataclass

from mars_ray.data.records import Message
from mars_ray.measure import Sample


@dataclass(frozen=True, slots=True)
class RacePrompt:
    """A question, and the kind of work that it represents."""

    workload: str
    question: str
    example: tuple[str, str] | None = None
    """A question of the same kind and its answer, placed before `question`."""

    @property
    def messages(self) -> list[Message]:
        """The conversation, which ends with the question."""
        turns = zip(("user", "assistant"), self.example or (), strict=False)
        return [
            *({"role": role, "content": content} for role, content in turns),
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
"""One prompt per kind of work, from hard to easy to predict."""


@dataclass(frozen=True, slots=True)
class TimedChunk:
    """The tokens of one forward."""

    at_s: float
    """Seconds since the request was added."""
    tokens: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane(Sample):
    """The answer of one setting to the prompt."""

    setting: str
    chunks: tuple[TimedChunk, ...]

    def until(self, at_s: float) -> "Lane":
        """Return the part of the answer that had been decoded `at_s` seconds after the request was added."""
        chunks = tuple(chunk for chunk in self.chunks if chunk.at_s <= at_s)
        return Lane(
            setting=self.setting,
            chunks=chunks,
            tokens=sum(chunk.tokens for chunk in chunks),
            forwards=len(chunks),
            seconds=min(at_s, self.seconds),
        )

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens divided by forwards; 1 before the first forward."""
        return self.tokens / self.forwards if self.forwards else 1.0


@dataclass(frozen=True, slots=True)
class Race:
    """A prompt, and the answers of all settings, with autoregressive decoding first."""

    prompt: RacePrompt
    lanes: tuple[Lane, ...]

    @property
    def first_s(self) -> float:
        """Seconds until the fastest setting finished."""
        return min(lane.seconds for lane in self.lanes)

    @property
    def last_s(self) -> float:
        """Seconds until the slowest setting finished."""
        return max(lane.seconds for lane in self.lanes)
