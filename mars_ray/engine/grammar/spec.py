"""The grammar of a request: a JSON schema, any JSON object, a regular expression, or a grammar in Lark.

Unlike `library`, this module does not import llguidance, so requests can be created without it.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from mars_ray.errors import RequestError

GrammarKind = Literal["json_schema", "json_object", "regex", "lark"]

GRAMMAR_CHARACTERS_MAX = 2**15
"""Maximum length of a grammar, enough for a thousand properties. `process/grammar_checker` limits the cost of a
grammar."""

LARK_CHARACTERS_MAX = 2**17
"""Maximum length of a grammar in Lark, which may hold the schemas of a hundred tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarSpec:
    """The grammar of a request. Raises `RequestError` for an unknown kind, or if it is too long."""

    kind: GrammarKind
    text: str = ""
    """The JSON schema, the regular expression or the grammar; empty for the kind "json_object"."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise RequestError(f"the kind of a grammar is {self.kind!r}; choose one of {get_args(GrammarKind)}.")
        most = LARK_CHARACTERS_MAX if self.kind == "lark" else GRAMMAR_CHARACTERS_MAX
        if len(self.text) > most:
            subject = "grammar of the answer" if self.kind == "lark" else self.kind
            raise RequestError(f"the {subject} has {len(self.text)} characters; at most {most} are allowed.")
