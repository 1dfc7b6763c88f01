"""Matches of a text index: the longest of the latest places, whatever the text, in bounded time and memory."""

import tracemalloc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mars_ray.engine.drafting.text_index import BYTES_PER_TOKEN, CHAIN, LONGEST, NGRAM, TextIndex, TextMatch

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=60), max_size=4)
TAILS = st.lists(st.integers(0, 3), max_size=40)


def index_of(texts: list[list[int]]) -> TextIndex:
    index = TextIndex()
    for text in texts:
        index.extend(text)
        index.end_text()
    return index


def plain_match(text: list[int], tokens: list[int]) -> TextMatch | None:
    """Compare the end of `tokens` with every place of `text`, the latest first."""
    if len(tokens) < NGRAM:
        return None
    places: list[tuple[int, int]] = []
    for place in range(len(text) - 1, NGRAM - 1, -1):
        length = 0
        while length < min(LONGEST, len(tokens), place) and text[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= NGRAM:
            places.append((length, place))
    places = [found for found in places[:CHAIN] if text[found[1]] >= 0]
    if not places:
        return None
    length, place = max(places, key=lambda found: found[0])
    agreeing = sum(text[other] == text[place] for _, other in places)
    return TextMatch(place, length, agreeing, len(places))


@given(TEXTS, TAILS)
def test_a_match_is_the_longest_and_latest_of_all_places(texts: list[list[int]], tokens: list[int]) -> None:
    index = index_of(texts)
    assert index.find(tokens) == plain_match(list(index.tokens), tokens)


@given(st.lists(st.integers(0, 3), max_size=80))
def test_a_text_is_searched_for_its_own_end_while_it_grows(text: list[int]) -> None:
    index = TextIndex()
    for end, token in enumerate(text, start=1):
        index.extend([token])
        assert index.find(text[:end]) == plain_match(text[:end], text[:end])


def test_what_follows_a_place_ends_at_the_border_of_its_text() -> None:
    index = index_of([[1, 2, 3, 4, 5], [6, 7, 8]])
    match = index.find([0, 1, 2, 3])
    assert match == TextMatch(next=3, length=3, agreeing=1, compared=1)
    assert index.following(match.next, 9) == [4, 5]
    assert index.following(match.next, 1) == [4]


def test_no_match_spans_two_texts() -> None:
    assert index_of([[1, 2], [3, 4]]).find([1, 2, 3]) is None


def test_a_search_compares_a_bounded_number_of_tokens_whatever_the_text() -> None:
    """One token again and again, two in turns, and noise: the texts with the longest chains and matches."""
    for text in ([7] * 100_000, [1, 2] * 50_000, [number * 7919 % 251 for number in range(100_000)]):
        reads = 0

        class Counted(list[int]):
            def __getitem__(self, key: Any) -> Any:
                nonlocal reads
                reads += 1
                return super().__getitem__(key)

        index = TextIndex()
        index.extend(text)
        index.find(Counted(text))
        assert reads <= 1 + CHAIN * LONGEST


def test_memory_by_token_is_within_what_is_stated() -> None:
    tracemalloc.start()
    try:
        index = TextIndex()
        index.extend(number * 7919 % 50_021 + 500 for number in range(50_000))
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used <= BYTES_PER_TOKEN * 50_000
