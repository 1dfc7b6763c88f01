"""The tree at the top of `errors` is the tree of classes."""

import inspect
import re

from mars_ray import errors
from mars_ray.errors import MarsRayError

CLASSES = [each for _, each in inspect.getmembers(errors, inspect.isclass) if issubclass(each, MarsRayError)]


def test_every_error_stands_in_the_drawing_under_its_base() -> None:
    drawn: dict[str, str | None] = {}
    open_bases: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        if found := re.match(r"^([│├└─ ]*)(\w+Error)\b", line):
            depth, name = len(found[1]), found[2]
            open_bases = [base for base in open_bases if base[0] < depth]
            drawn[name] = open_bases[-1][1] if open_bases else None
            open_bases.append((depth, name))
    bases = {each.__name__: each.__bases__[0].__name__ for each in CLASSES}
    assert drawn == bases | {"MarsRayError": None}


def test_every_error_says_how_the_command_ends() -> None:
    codes = {each: each.exit_code for each in CLASSES}
    assert {code for each, code in codes.items() if issubclass(each, errors.InputError)} == {2}
    assert codes[errors.InterruptedRunError] == 130
    assert codes[errors.DivergedError] == 1
