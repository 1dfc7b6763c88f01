"""Right and wrong answers."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.errors import DataError
from mars_ray.evaluation import task_files
from mars_ray.evaluation.task_files import MATCHES, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7.", "7"),
        ("#### 1,205", "1205"),
        ("it costs $-2.50, all told", "-2.5"),
        ("16-3", "3"),
        ("= -3", "-3"),
        (".5", "0.5"),
        ("7.0", "7"),
        ("the answer is...42", "42"),
        ("= \N{MINUS SIGN}3", "-3"),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str) -> None:
    assert last_number(text) == Decimal(number)


@given(st.text())
def test_a_text_without_digits_has_no_number(text: str) -> None:
    assert last_number("".join(each for each in text if not each.isdigit())) is None


@pytest.mark.parametrize(
    ("match", "reference", "text", "right"),
    [
        ("exact", "yes", " yes\n", True),
        ("exact", "yes", "Yes", False),
        ("regex", "^a+$", "aaa", True),
        ("regex", "b", "abc", True),
        ("regex", "^b", "abc", False),
        ("json", '{"a": [1, 2]}', '{ "a" : [1,2] }', True),
        ("json", '{"a": [1, 2]}', '{"a": [2, 1]}', False),
        ("json", "1", "not json", False),
        ("number", "12", "a dozen", False),
        ("number", "12", "it is 12.0", True),
    ],
)
def test_each_way_to_compare(match: str, reference: str, text: str, right: bool) -> None:
    assert MATCHES[match](reference, text) is right


def test_a_regular_expression_that_never_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_files, "REGEX_SECONDS_MAX", 0.1)
    with pytest.raises(DataError, match=r"the regular expression '.*' takes more than 0.1 s"):
        MATCHES["regex"]("^(a|aa)+$", "a" * 80 + "b")


@given(st.sampled_from(["exact", "json", "number"]), st.text())
def test_no_text_is_an_error(match: str, text: str) -> None:
    assert MATCHES[match]('{"a": 1}', text) in (True, False)
