"""Who is beaten in everything, and who is not."""

from benchmarks.policy.dominance import PolicyScore, dominated, mean_of


def scores(good: list[float], accuracy: list[float]) -> list[PolicyScore]:
    return [PolicyScore(*each) for each in zip(good, accuracy, strict=True)]


WORSE = scores([0.90, 0.91, 0.89], [0.97, 0.97, 0.97])
BETTER = scores([0.95, 0.96, 0.94], [0.98, 0.98, 0.98])


def test_who_is_worse_in_both_is_beaten() -> None:
    assert dominated({"a": WORSE, "b": BETTER}) == [("a", "b")]


def test_who_is_better_in_one_is_not_beaten() -> None:
    assert dominated({"a": scores([0.90, 0.91, 0.89], [0.99] * 3), "b": BETTER}) == []


def test_a_difference_that_chance_explains_beats_nobody() -> None:
    lucky = scores([0.99, 0.80, 0.93], [0.98] * 3)
    assert dominated({"a": WORSE, "b": lucky}) == []
    assert dominated({"a": WORSE, "b": scores([0.9004, 0.9104, 0.8904], [0.98] * 3)}) == []


def test_means_come_with_their_spread() -> None:
    found = mean_of(BETTER)
    assert round(found.good, 4) == 0.95 and round(found.good_std, 4) == 0.01 and found.accuracy_std == 0
