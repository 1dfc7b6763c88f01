"""Metrics, judged by counting answers one at a time."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.evaluation.metrics import metrics_of, stops_of
from mars_ray.evaluation.scorer import ScoredAnswer, Scores
from tests.evaluation.evaluate_samples import SETTINGS, answer, scores_of, task_of

TASKS = (task_of("a", (3, 2)), task_of("b", (1, 2)))
QUESTIONS = [question for task in TASKS for question in task.questions]
Answered = dict[tuple[str, str], ScoredAnswer]
"""Answers by the name of the question, and the setting."""

answers = st.builds(
    answer,
    right=st.booleans(),
    tokens=st.integers(1, 9),
    forwards=st.integers(1, 9),
    agreed=st.integers(0, 1),
    key=st.sampled_from([b"x", b"y"]),
)


def scores(given: Answered) -> Scores:
    found = scores_of(TASKS)
    questions = {question.name: question for question in QUESTIONS}
    for (name, setting), each in given.items():
        found.add(questions[name], setting, each)
    return found


@st.composite
def answered(draw: st.DrawFn) -> Answered:
    """Some questions stay without an answer."""
    places = [(question.name, setting) for question in QUESTIONS for setting in SETTINGS]
    return {place: each for place in draw(st.permutations(places)) if (each := draw(st.none() | answers))}


@given(answered())
def test_the_figures_are_those_counted_one_answer_at_a_time(given: Answered) -> None:
    found = metrics_of(scores(given), "threshold 0.9", None, agreement=True)
    mine = {question.name: given.get((question.name, "threshold 0.9")) for question in QUESTIONS}
    theirs = {question.name: given.get((question.name, "ar")) for question in QUESTIONS}

    def accuracy(of: dict[str, ScoredAnswer | None], seeds: tuple[int, ...]) -> float:
        of_tasks = [
            statistics.fmean(
                bool((each := of[question.name]) and each.right)
                for question in task.questions
                if question.seed in seeds
            )
            for task in TASKS
        ]
        return statistics.fmean(of_tasks)

    there = [each for each in mine.values() if each]
    by_seed = [accuracy(mine, (seed,)) for seed in (0, 1)]
    assert found.examples == 8
    assert found.unanswered == 8 - len(there)
    assert found.right == sum(each.right for each in there)
    assert found.accuracy == pytest.approx(accuracy(mine, (0, 1)))
    assert found.accuracy_low <= found.accuracy <= found.accuracy_high
    assert found.accuracy_std == pytest.approx(statistics.stdev(by_seed))
    tokens, forwards = sum(each.tokens for each in there), sum(each.forwards for each in there)
    assert (found.tokens, found.forwards) == (tokens, forwards)
    assert found.tokens_per_forward == (pytest.approx(tokens / forwards) if there else None)
    assert found.agreement == (pytest.approx(sum(each.agreed for each in there) / tokens) if there else None)
    pairs = [(mine[name], theirs[name]) for name in mine]
    assert found.same_answers == pytest.approx(sum(bool(a and b and a.key == b.key) for a, b in pairs) / 8)
    verdicts = [(bool(a and a.right), bool(b and b.right)) for a, b in pairs]
    assert found.against_ar is not None
    assert found.against_ar.better == verdicts.count((True, False))
    assert found.against_ar.worse == verdicts.count((False, True))
    base = metrics_of(scores(given), "ar", None, agreement=True)
    assert found.against_ar.difference == pytest.approx(found.accuracy - base.accuracy)


@given(answered(), st.randoms())
def test_the_order_in_which_answers_come_changes_nothing(given: Answered, random: object) -> None:
    places = list(given)
    random.shuffle(places)  # type: ignore[attr-defined]
    one, other = scores(given), scores({place: given[place] for place in places})
    for setting in SETTINGS:
        for task in (None, "a", "b"):
            assert metrics_of(one, setting, task, agreement=True) == metrics_of(other, setting, task, agreement=True)
        assert stops_of(one, setting) == stops_of(other, setting)


def test_nothing_is_compared_with_itself_and_a_sampled_answer_agrees_with_nothing() -> None:
    found = metrics_of(scores({}), "ar", "a", agreement=False)
    assert (found.against_ar, found.agreement, found.agreement_std) == (None, None, None)
    assert (found.examples, found.unanswered, found.tokens_per_forward) == (5, 5, None)


def test_a_forward_that_ended_an_answer_says_nothing_about_where_acceptance_stops() -> None:
    found = scores_of(TASKS)
    given = ScoredAnswer(right=True, tokens=8, forwards=4, agreed=8, key=b"k" * 16, accepted_lengths=(1, 4, 1, 2))
    found.add(QUESTIONS[0], "ar", given)
    assert stops_of(found, "ar") == (2, 0, 0, 1)
