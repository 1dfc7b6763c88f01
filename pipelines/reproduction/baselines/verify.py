"""Greedy verification of guessed tokens."""

from collections.abc import Sequence


def verify_greedily(guesses: Sequence[int], predicted: Sequence[int]) -> list[int]:
    """Return the right guesses, up to the first wrong one, and the token the network predicted in place of that.

    `predicted` has one token more than `guesses`: before each of them, and after the last. So 1..len(predicted) tokens
    are returned, of which all but the last were guessed.
    """
    right = 0
    while right < len(guesses) and guesses[right] == predicted[right]:
        right += 1
    return list(predicted[: right + 1])
