"""A grammar as a caller gives it: JSON of a schema, any JSON object, or what a regular expression matches.

Apart from the library that reads it (see `library`), so that requests can be made without loading that.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from mars_ray.errors import RequestError

GrammarKind = Literal["json_schema", "json_object", "regex"]

GRAMMAR_CHARACTERS_MAX = 2**15
"""Enough for a thousand properties. What a grammar costs is found out apart (see `process/grammar_checker`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """A grammar as a caller gives it. Raises `RequestError` for one that is too long."""

    kind: GrammarKind
    text: str = ""
    """The schema as JSON, or the regular expression; nothing for any JSON object."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise RequestError(f"the kind of a grammar is {self.kind!r}; choose one of {get_args(GrammarKind)}.")
        if len(self.text) > GRAMMAR_CHARACTERS_MAX:
            raise RequestError(
                f"the {self.kind} has {len(self.text)} characters; at most {GRAMMAR_CHARACTERS_MAX} are allowed."
            )
