"""How deep JSON may be nested.

Python can read deeper values than it can write, and the limit depends on the depth of the stack. A value that one
thread has read may therefore fail in another, after the work on it. So values are refused from a fixed depth on.
"""

from typing import Any

LEVELS = 200
"""Maximum depth of arrays and objects."""


def is_nested_too_deeply(text: str | bytes, value: Any) -> bool:
    """Return whether `value`, which was parsed from `text`, has more than `LEVELS` levels of arrays and objects."""
    brackets = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    count = sum(map(text.count, brackets))  # type: ignore[arg-type]  # both are of one type
    return count > LEVELS and has_too_many_levels(value)


def has_too_many_levels(value: Any) -> bool:
    """Return whether `value` has more than `LEVELS` levels of arrays and objects."""
    level = [value]
    for _ in range(LEVELS):
        level = [child for item in level for child in _children(item) if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _children(item: Any) -> Any:
    return item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
