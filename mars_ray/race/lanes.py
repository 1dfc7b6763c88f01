"""What a race found: the answer of each setting, with the times at which forwards gave its parts."""

from dataclasses import dataclass

from mars_ray.measure import Sample
from mars_ray.race.prompts import RacePrompt


@dataclass(frozen=True, slots=True)
class TimedChunk:
    """What one forward gave."""

    at_s: float
    """Seconds since the question was asked."""
    tokens: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane(Sample):
    """The answer of one setting."""

    setting: str
    chunks: tuple[TimedChunk, ...]

    def until(self, at_s: float) -> "Lane":
        """Return what there was so many seconds after the question was asked."""
        given = tuple(chunk for chunk in self.chunks if chunk.at_s <= at_s)
        return Lane(
            setting=self.setting,
            chunks=given,
            tokens=sum(chunk.tokens for chunk in given),
            forwards=len(given),
            seconds=min(at_s, self.seconds),
        )

    @property
    def text(self) -> str:
        """The answer."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens divided by the forwards that gave them; 1 before the first."""
        return self.tokens / self.forwards if self.forwards else 1.0


@dataclass(frozen=True, slots=True)
class Race:
    """A prompt, and what each setting made of it; that of one token at a time is first."""

    prompt: RacePrompt
    lanes: tuple[Lane, ...]

    @property
    def first_s(self) -> float:
        """Seconds until the first of them was done."""
        return min(lane.seconds for lane in self.lanes)

    @property
    def last_s(self) -> float:
        """Seconds until all of them were."""
        return max(lane.seconds for lane in self.lanes)
