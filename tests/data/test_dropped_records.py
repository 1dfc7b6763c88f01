"""Reasons of dropped records: grouped by rule, whatever values their texts name."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.data.dropped_records import DroppedRecords, rule_of
from mars_ray.data.records import parse_record
from mars_ray.errors import BadRecordError, DataError


def reason_of(record: object) -> str:
    with pytest.raises(BadRecordError) as caught:
        parse_record(record if isinstance(record, bytes) else json.dumps(record).encode())
    return str(caught.value)


NO_LISTS = st.text(st.characters(exclude_characters="["))
"""Texts that are no list as JSON."""


@given(one=NO_LISTS, other=NO_LISTS)
def test_records_that_break_the_same_rule_have_the_same_reason_whatever_they_hold(one: str, other: str) -> None:
    alike: list[list[object]] = [
        [{"text": one}, {"text": one, "id": 3, "note": other}],
        [{"messages": one}, {"messages": {"a": other}}, {"messages": 3}],
        [{"messages": [{"role": one + "?"}]}, {"messages": [{"role": "user", "content": "a"}, {"role": other + "?"}]}],
        [b"[1]", b"3", json.dumps(one).encode()],
    ]
    for records in alike:
        assert len({rule_of(reason_of(record)) for record in records}) == 1


def test_records_that_break_different_rules_have_different_reasons() -> None:
    records = [
        {"prompt": "a"},
        {"text": "a"},
        {"messages": 3},
        {"prompt": "a", "response": ""},
        b"[]",
        b"{",
        {"prompt": 1},
    ]
    reasons = {rule_of(reason_of(record)) for record in records}
    assert len(reasons) == len(records)


def test_the_commonest_reasons_come_first_with_the_first_record_of_each() -> None:
    dropped = DroppedRecords()
    for number, text in enumerate(["a rule", "row 1 is bad", "row 2 is bad", "b rule", "c rule", "b rule"], start=1):
        dropped.add(text, number)
    assert dropped.summary("x.jsonl", 60) == (
        "x.jsonl: 6 of 60 records dropped: 2 x row 1 is bad (first: record 2), 2 x b rule (first: record 4), "
        "1 x a rule (first: record 1), 1 x for other reasons"
    )


def test_the_share_is_held_exactly() -> None:
    dropped = DroppedRecords()
    dropped.add("a rule", 3)
    dropped.check("x.jsonl", 10, 0.1)
    with pytest.raises(DataError, match=r"1 of 9 records dropped: 1 x a rule \(first: record 3\). That is 11.1%"):
        dropped.check("x.jsonl", 9, 0.1)
