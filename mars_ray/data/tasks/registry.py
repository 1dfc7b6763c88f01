"""The thirteen task families, keyed by name: first those that are easy to predict ahead, then the hard ones."""

from collections.abc import Mapping
from types import MappingProxyType

from mars_ray.data.tasks.families import (
    csv_to_json,
    date_rewrite,
    follow_links,
    json_extract,
    list_format,
    message_fill,
    rephrase,
    sort_numbers,
    sum_direct,
    table_to_text,
    tool_call,
    unit_convert,
    word_problem,
)
from mars_ray.data.tasks.family import Family

_ORDERED = (
    json_extract.FAMILY,
    table_to_text.FAMILY,
    csv_to_json.FAMILY,
    list_format.FAMILY,
    word_problem.FAMILY,
    unit_convert.FAMILY,
    date_rewrite.FAMILY,
    message_fill.FAMILY,
    tool_call.FAMILY,
    sort_numbers.FAMILY,
    sum_direct.FAMILY,
    follow_links.FAMILY,
    rephrase.FAMILY,
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ORDERED})
"""All families, keyed by name, in a fixed order."""


def is_right_answer(family: str, answer: str, text: str) -> bool:
    """Return whether the verifier of the family accepts `text`; a wrong text never raises an error."""
    return FAMILIES[family].verify(answer, text)
