"""Random tools, calls and answers, and ways to cut an answer into pieces."""

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from mars_ray.chat.call_format import MARKERS
from mars_ray.openai_api.answer_parts import AnswerPart, CallPart, ContentPart, ReasoningPart

NAMES = ("get_weather", "now", "a-b", "f")
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
IDENTIFIERS = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(IDENTIFIERS, JSON, max_size=3)), min_size=1, max_size=3
)
PROSE = st.text("ab {}[]<>\"',;:\n/", max_size=30) | st.sampled_from([marker[:-1] for marker in sorted(MARKERS)])
"""Text of an answer that may look like the beginning of a call."""


def cut(text: str, places: Iterable[int]) -> list[str]:
    """Cut a text at places that count from its beginning, modulo its length."""
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def joined(parts: Iterable[AnswerPart]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, content and calls, each with its parts joined."""
    reasoning, content, calls = "", "", dict[int, list[str]]()
    for part in parts:
        match part:
            case ReasoningPart(text):
                reasoning += text
            case ContentPart(text):
                content += text
            case CallPart(index, arguments, name):
                assert (name is not None) == (index not in calls), "the name comes first and once"
                call = calls.setdefault(index, [name or "", ""])
                call[1] += arguments
    assert [*calls] == list(range(len(calls)))
    return reasoning, content, [(name, arguments) for name, arguments in calls.values()]
