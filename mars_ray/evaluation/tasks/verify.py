"""Tell whether an answer is right, by the verifier of a task family or by comparing it with a reference.

Code is not run here; that is `code_check`.
"""

import re
from collections.abc import Callable
from decimal import Decimal

import regex

from mars_ray.data.tasks import FAMILIES
from mars_ray.data.tasks.checks import same_json, same_text
from mars_ray.errors import DataError

_NUMBER = re.compile(r"(?<!\d)(?<!\d\.)-?\d[\d,]*(?:\.\d+)?|(?<![\d.])-?\.\d+")
"""A minus behind a digit is a subtraction; dots before a number are a pause."""
REGEX_SECONDS_MAX = 5


def last_number(text: str) -> Decimal | None:
    """Return the last number of a text; commas within it group its digits."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def _same_number(reference: str, text: str) -> bool:
    return last_number(text) == last_number(reference)


def _matches(reference: str, text: str) -> bool:
    try:
        return regex.search(reference, text, timeout=REGEX_SECONDS_MAX) is not None
    except TimeoutError:
        raise DataError(
            f"the regular expression {reference!r} takes more than {REGEX_SECONDS_MAX} s on an answer. Write it so "
            "that a text can match in one way only, and evaluate into another output."
        ) from None


FILE_MATCHES: dict[str, Callable[[str, str], bool]] = {"exact": same_text, "regex": _matches, "json": same_json}
"""Those that a file of one's own may ask for: equal but for white space around it; found in the text; equal as JSON."""
MATCHES = FILE_MATCHES | {"number": _same_number} | {name: family.verify for name, family in FAMILIES.items()}
