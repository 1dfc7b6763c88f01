"""Answers that differ, and their tokens."""

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.evaluation.report_page import _choose, tokens_shown
from tests.evaluation.evaluate_samples import answer, scores_of, task_of

BYTES = [bytes([number]) for number in range(256)]


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.data())
def test_the_pieces_of_an_answer_are_its_text_cut_by_forwards(text: str, data: st.DataObject) -> None:
    tokens = list(text.encode())
    accepted_lengths: list[int] = []
    while sum(accepted_lengths) < len(tokens):
        accepted_lengths.append(data.draw(st.integers(1, len(tokens) - sum(accepted_lengths))))
    found = list(tokens_shown(tokens, accepted_lengths, tokens, BYTES))
    assert "".join(piece.text for piece in found) == text
    assert [
        [piece.forward for piece in found].count(forward) for forward in range(len(accepted_lengths))
    ] == accepted_lengths
    assert all(piece.same for piece in found)


def test_tokens_that_ar_has_not_at_their_place_are_told() -> None:
    found = list(tokens_shown([1, 2, 3], [2, 1], [1, 9], BYTES))
    assert [piece.same for piece in found] == [True, False, False]


def test_a_token_outside_the_vocabulary_is_no_text() -> None:
    [piece] = tokens_shown([300], [1], [300], BYTES)
    assert piece.text == ""


def test_answers_that_cost_a_right_one_come_first_and_same_ones_never() -> None:
    tasks = (task_of("a", (4,)), task_of("b", (2,)))
    scores = scores_of(tasks)
    verdicts = {"a": [(True, True, b"k"), (True, True, b"x"), (False, True, b"x"), (True, False, b"x")]}
    verdicts["b"] = [(True, False, b"x"), (True, False, b"k")]
    for task in tasks:
        for question, (ar, other, key) in zip(task.questions, verdicts[task.name], strict=True):
            scores.add(question, "ar", answer(right=ar))
            scores.add(question, "threshold 0.9", answer(right=other, key=key))
    assert _choose(scores, "threshold 0.9") == [3, 4, 2]
