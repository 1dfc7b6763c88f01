"""A threshold that an operator set by hand.

In:    a class, a threshold, for how long.
Out:   frozen overrides, and the JSON in which they outlive the controller.
Never: lasts beyond its end, or outside the bounds of its class.
"""

from dataclasses import dataclass

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True)
class Override:
    """In force for one class of service."""

    threshold: float
    ends_unix_s: float | None
    """None lasts until it is cleared."""


_BY_CLASS = TypeAdapter(dict[str, Override])


def to_json(overrides: dict[str, Override]) -> bytes:
    """Return what `from_json` reads."""
    return _BY_CLASS.dump_json(overrides)


def from_json(text: bytes) -> dict[str, Override]:
    """Return overrides by class."""
    return _BY_CLASS.validate_json(text)
