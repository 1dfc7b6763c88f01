"""A race that nobody ran, with times that are easy to reckon with."""

from mars_ray.demo.race import Lane, Race, RacePrompt, TimedChunk


def lane(setting: str, *chunks: TimedChunk) -> Lane:
    return Lane(
        setting=setting,
        chunks=chunks,
        tokens=sum(chunk.tokens for chunk in chunks),
        forwards=len(chunks),
        seconds=chunks[-1].at_s,
    )


ALONE = lane("ar", TimedChunk(1.0, 1, "one "), TimedChunk(2.0, 1, "two "), TimedChunk(4.0, 1, "three"))
AHEAD = lane("exact", TimedChunk(1.0, 2, "one two "), TimedChunk(2.0, 1, "three"))
RACE = Race(RacePrompt("general", "Count to three."), (ALONE, AHEAD))
