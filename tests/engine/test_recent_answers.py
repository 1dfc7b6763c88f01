"""Recent answers: each key finds its own, the latest are kept, and memory is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.drafting.recent_answers import RecentAnswers

ANSWERS = st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 9), max_size=30)), max_size=40)


def test_an_answer_drafts_for_its_key_and_for_no_other() -> None:
    recent = RecentAnswers()
    recent.add("ada", [1, 2, 3, 4, 5])
    found = recent.find("ada", [1, 2, 3])
    assert found and found[0].following(found[1].next, 9) == [4, 5]
    assert recent.find("bob", [1, 2, 3]) is None


@given(ANSWERS, st.integers(4, 60))
def test_the_tokens_of_all_keys_are_bounded_and_the_last_answer_is_there(
    answers: list[tuple[str, list[int]]], most: int
) -> None:
    recent = RecentAnswers(most)
    for key, answer in answers:
        recent.add(key, answer)
        assert recent.num_tokens <= most
        if 4 <= len(answer) < most // 2:
            assert recent.find(key, answer[:-1]) is not None


@given(ANSWERS)
def test_an_older_answer_is_found_until_as_many_tokens_as_half_the_bound_follow_it(
    answers: list[tuple[str, list[int]]],
) -> None:
    recent, seen = RecentAnswers(400), 0
    recent.add("d", [20, 21, 22, 23])
    for _, answer in answers:
        seen += len(answer) + 1
        if seen + 5 > 200:
            return
        recent.add("d", answer)
        assert recent.find("d", [20, 21, 22]) is not None
