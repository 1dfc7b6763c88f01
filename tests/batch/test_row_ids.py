"""Every row is one row, and the same one in every run."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.batch.rows.columns import Survey
from mars_ray.batch.rows.row_ids import RowId, RowIdAssigner, id_in
from mars_ray.errors import BadRecordError

rows = st.fixed_dictionaries(
    {"prompt": st.sampled_from("ab")}, optional={"id": st.sampled_from(["", "x", "x-2", "made 1 x", 7, None, [1]])}
).map(lambda fields: json.dumps(fields).encode())


def raw(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def assign(*raws: bytes) -> list[RowId]:
    survey = Survey()
    with RowIdAssigner("id") as row_ids:
        return [row_ids.assign(raw, survey.add(raw)) for raw in raws]


def test_a_row_that_has_an_id_keeps_it_whatever_else_it_says() -> None:
    one, number = assign(raw(id="a", prompt="x"), raw(id=7, prompt="x"))
    assert (one.id, number.id) == ("a", "7")
    assert one.is_own and number.is_own
    assert [one] == assign(raw(id="a", prompt="another"))


def test_without_an_id_the_same_content_has_the_same_one() -> None:
    [one] = assign(b'{"prompt": "x", "n": 1}')
    assert len(one.id) == 16
    assert assign(b'{ "n":1, "id": null, "prompt" : "\\u0078", "other": null }') == [one]
    [other] = assign(raw(prompt="x", n=2))
    assert other.id != one.id


def test_equal_rows_are_as_many_rows() -> None:
    found = assign(*[raw(prompt="x")] * 3, raw(prompt="y"))
    assert [each.id for each in found[1:3]] == [f"{found[0].id}-2", f"{found[0].id}-3"]
    assert len({each.key for each in found}) == 4
    assert not any(each.repeated for each in found)


def test_an_id_given_twice_is_told_and_the_rows_are_still_two() -> None:
    first, other, second = assign(raw(id="a", prompt="x"), raw(id="b"), raw(id="a", prompt="y"))
    assert [first.repeated, other.repeated, second.repeated] == [False, False, True]
    assert (first.id, second.id) == ("a", "a")
    assert first.key != second.key


def test_a_row_that_is_none_has_an_identity_too() -> None:
    deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    raws = [b"{oops", b"\xff", b"[1]", b"", deep, raw(id=[1]), b'{"id": "\\ud800"}', raw(prompt="\ud800")]
    found = assign(*raws, *raws)
    assert len({each.key for each in found}) == len({each.id for each in found}) == 2 * len(raws)


@given(st.lists(rows, max_size=12))
def test_keys_differ_and_are_the_same_in_every_run(raws: list[bytes]) -> None:
    whole = assign(*raws)
    assert len({each.key for each in whole}) == len(raws)
    assert {len(each.key) for each in whole} <= {16}
    assert assign(*raws) == whole


@given(st.integers(-(2**53), 2**53))
def test_a_whole_number_has_the_id_of_the_integer(number: int) -> None:
    assert id_in({"key": float(number)}, "key") == id_in({"key": number}, "key") == str(number)


@pytest.mark.parametrize("value", [math.nan, math.inf, None, ""])
def test_an_id_without_a_value_is_no_id(value: object) -> None:
    assert id_in({"key": value}, "key") is None


@pytest.mark.parametrize("value", [[1], {}, 1.5, 1e300, True, "\ud800"])
def test_an_id_that_is_none_is_refused_with_the_reason_or_passed_over(value: object) -> None:
    with pytest.raises(BadRecordError, match=r"'key' (must be text or an integer|is not valid Unicode)"):
        id_in({"key": value}, "key")
    [row_id] = assign(json.dumps({"id": value}).encode())
    assert not row_id.is_own
