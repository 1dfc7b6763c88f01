"""Compare answers with references, using either the verifier of a task family or a type of match (such as exact match).

Answers that are code are run by `code_check` instead.
"""

import re
from collections.abc import Callable
from decimal import Decimal

import regex

from mars_ray.data.tasks import FAMILIES
from mars_ray.data.tasks.checks import same_json, same_text
from mars_ray.errors import DataError

_NUMBER = re.compile(r"(?<!\d)(?<!\d\.)-?\d[\d,]*(?:\.\d+)?|(?<![\d.])-?\.\d+")
"""Pattern of a number. A minus after a digit is read as subtraction, and dots before a number as an ellipsis."""
REGEX_SECONDS_MAX = 5


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None. Commas may group its digits."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _same_number(reference: str, text: str) -> bool:
    return last_number(text) == last_number(reference)


def _matches(reference: str, text: str) -> bool:
    try:
        return regex.search(reference, text, timeout=REGEX_SECONDS_MAX) is not None
    except TimeoutError:
        raise DataError(
            f"the regular expression {reference!r} takes more than {REGEX_SECONDS_MAX} s on an answer. Write it so "
            "that a text can match in only one way, and evaluate into another output."
        ) from None


FILE_MATCHES: dict[str, Callable[[str, str], bool]] = {"exact": same_text, "regex": _matches, "json": same_json}
"""Types of match for files: "exact" ignores surrounding white space, "regex" finds the reference in the text as a
regular expression, and "json" compares JSON values."""
MATCHES = FILE_MATCHES | {"number": _same_number} | {name: family.verify for name, family in FAMILIES.items()}
