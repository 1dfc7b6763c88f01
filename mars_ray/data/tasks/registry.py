"""The thirteen task families, keyed by name: first those that are easy to predict ahead, then the hard ones."""

from collections.abc import Mapping
from types import MappingProxyType

from mars_ray.data.tasks.families import numbers, rewriting
from mars_ray.data.tasks.families.rephrase import REPHRASE
from mars_ray.data.tasks.families.tool_call import TOOL_CALL
from mars_ray.data.tasks.family import Family

_ORDERED = (
    rewriting.JSON_EXTRACT,
    rewriting.TABLE_TO_TEXT,
    rewriting.CSV_TO_JSON,
    rewriting.LIST_FORMAT,
    numbers.WORD_PROBLEM,
    numbers.UNIT_CONVERT,
    rewriting.DATE_REWRITE,
    rewriting.MESSAGE_FILL,
    TOOL_CALL,
    numbers.SORT_NUMBERS,
    numbers.SUM_DIRECT,
    numbers.FOLLOW_LINKS,
    REPHRASE,
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ORDERED})
"""All families, keyed by name, in a fixed order."""


def is_right_answer(family: str, answer: str, text: str) -> bool:
    """Return whether the verifier of the family accepts `text`; a wrong text never raises an error."""
    return FAMILIES[family].verify(answer, text)
