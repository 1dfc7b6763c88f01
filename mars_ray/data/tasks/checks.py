"""The verifiers of most task families: one compares texts, the other JSON values."""

import json


def same_text(answer: str, text: str) -> bool:
    """Return whether `text` equals the answer, ignoring white space around it."""
    return text.strip() == answer


def same_json(answer: str, text: str) -> bool:
    """Return whether `text` is JSON with the same value as the answer, ignoring key order and spacing.

    Stricter than `==` on parsed values: 1, 1.0 and true differ, and a duplicate key is wrong.
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
        raise ValueError("an object has a duplicate key")
    return value
