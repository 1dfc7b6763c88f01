"""Find the beginning of a marker, such as a stop string, at the end of a text that goes on."""

from collections.abc import Sequence


def begun_marker(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that begins a marker without completing it."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(len(marker) > length and marker.startswith(tail) for marker in markers):
            return length
    return 0
