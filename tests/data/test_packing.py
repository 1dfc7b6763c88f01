from itertools import chain
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.data.chat import Encoded
from mars_ray.data.packing import OPEN_ROWS_MAX, PackedRow, Packer, fitted
from tests.data.data_samples import example

Lengths = list[int]


def pack(
    lengths: Lengths, length: int, overlong: Literal["drop", "truncate"] = "drop"
) -> tuple[Packer, list[PackedRow]]:
    """Pack examples of these lengths; every token of example n is the number n, the first is the prompt."""
    packer = Packer(length)
    examples = [fitted(example([n] * tokens, prompt=1), length, overlong) for n, tokens in enumerate(lengths)]
    rows = [row for encoded in examples if isinstance(encoded, Encoded) for row in packer.add(encoded)]
    return packer, rows + packer.finish()


def numbers(row: PackedRow) -> list[int]:
    return [int(encoded.tokens[0]) for encoded in row.examples]


@given(lengths=st.lists(st.integers(1, 24), max_size=300), length=st.integers(1, 20))
def test_every_example_is_in_one_row_whole_and_in_order_or_dropped(lengths: Lengths, length: int) -> None:
    _, rows = pack(lengths, length)
    kept = [n for n, tokens in enumerate(lengths) if tokens <= length]
    assert sorted(chain.from_iterable(map(numbers, rows))) == kept
    assert all(numbers(row) == sorted(numbers(row)) for row in rows)
    assert all(len(encoded.tokens) == lengths[encoded.tokens[0]] for row in rows for encoded in row.examples)


@given(lengths=st.lists(st.integers(1, 24), max_size=300), length=st.integers(2, 20))
def test_the_counts_are_those_of_the_rows(lengths: Lengths, length: int) -> None:
    packer, rows = pack(lengths, length, "truncate")
    inside = [encoded for row in rows for encoded in row.examples]
    assert packer.examples == len(inside) == len(lengths)
    assert packer.tokens == sum(len(encoded.tokens) for encoded in inside) == sum(row.tokens for row in rows)
    assert packer.response_tokens == sum(int(encoded.response.sum()) for encoded in inside)
    assert sorted(len(encoded.tokens) for encoded in inside) == sorted(min(tokens, length) for tokens in lengths)


@given(lengths=st.lists(st.integers(1, 20), max_size=300), length=st.integers(1, 20))
def test_no_row_is_empty_or_longer_than_the_length(lengths: Lengths, length: int) -> None:
    _, rows = pack(lengths, length)
    assert all(0 < row.tokens == sum(len(encoded.tokens) for encoded in row.examples) <= length for row in rows)


@given(lengths=st.lists(st.integers(1, 20), max_size=OPEN_ROWS_MAX))
def test_a_row_is_opened_only_for_an_example_that_fits_in_no_other(lengths: Lengths) -> None:
    _, rows = pack(lengths, 20)
    rows.sort(key=lambda row: numbers(row)[0])  # in the order in which they were opened
    for number, row in enumerate(rows):
        first = len(row.examples[0].tokens)
        for earlier in rows[:number]:
            before = sum(len(each.tokens) for each in earlier.examples if each.tokens[0] < row.examples[0].tokens[0])
            assert before + first > 20


@pytest.mark.parametrize(("longest", "fill"), [(51, 0.98), (128, 0.97), (512, 0.8)])
def test_rows_are_nearly_full(longest: int, fill: float) -> None:
    lengths = np.random.default_rng(0).integers(4, longest, size=5000).tolist()
    packer, rows = pack(lengths, 512)
    assert packer.tokens / (512 * len(rows)) > fill


def test_the_same_examples_give_the_same_rows() -> None:
    lengths = np.random.default_rng(1).integers(1, 60, size=2000).tolist()
    assert [numbers(row) for row in pack(lengths, 64)[1]] == [numbers(row) for row in pack(lengths, 64)[1]]


def test_the_fullest_row_with_room_is_filled_first() -> None:
    assert [numbers(row) for row in pack([5, 6, 4, 5], 10)[1]] == [[1, 2], [0, 3]]


def test_at_the_limit_of_open_rows_the_fullest_is_closed() -> None:
    packer = Packer(1000)
    for n in range(OPEN_ROWS_MAX):
        assert packer.add(example([n] * (501 + n))) == []
    (closed,) = packer.add(example([999] * 600))
    assert numbers(closed) == [OPEN_ROWS_MAX - 1]
    assert len(packer.finish()) == OPEN_ROWS_MAX


def test_two_rows_with_the_same_tokens_are_two_rows() -> None:
    _, rows = pack([7] * 5, 10)
    assert len(rows) == 5


def test_an_example_as_long_as_a_row_is_a_row() -> None:
    for overlong in ("drop", "truncate"):
        _, rows = pack([3, 10, 3], 10, overlong)
        assert [numbers(row) for row in rows] == [[1], [0, 2]]


def test_an_overlong_example_is_dropped_with_its_reason() -> None:
    assert fitted(example([0, 1, 2, 3, 4], prompt=3), 4, "drop") == "it is longer than 4 tokens"


def test_truncating_keeps_the_beginning() -> None:
    encoded = fitted(example([0, 1, 2, 3, 4, 5], prompt=3), 4, "truncate")
    assert isinstance(encoded, Encoded)
    assert encoded.tokens.tolist() == [0, 1, 2, 3]
    assert encoded.response.tolist() == [False, False, False, True]


def test_an_example_that_truncating_leaves_without_a_response_is_dropped() -> None:
    reason = fitted(example([0, 1, 2, 3, 4, 5], prompt=4), 4, "truncate")
    assert reason == "its response begins after 4 tokens, where it is truncated"
