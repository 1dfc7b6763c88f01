"""The two judgements most families share: the same text, and the same JSON value."""

import json


def same_text(answer: str, text: str) -> bool:
    """True when the text is the answer, apart from white space around it."""
    return text.strip() == answer


def same_json(answer: str, text: str) -> bool:
    """True when the text is JSON with the value of the answer; key order and spacing are free.

    Stricter than `==` on parsed values: 1, 1.0 and true differ, and a key given twice is refused.
    """
    try:
        return _canonical(text) == _canonical(answer)
    except (ValueError, RecursionError):
        return False


def _canonical(text: str) -> str:
    return json.dumps(json.loads(text, object_pairs_hook=_distinct_keys), sort_keys=True)


def _distinct_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a key is given twice")
    return value
