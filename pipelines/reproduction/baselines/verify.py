"""Greedy verification of guessed tokens."""

from collections.abc import Sequence


def verify_greedily(guesses: Sequence[int], predicted: Sequence[int]) -> list[int]:
    """Return the guesses before the first wrong guess, and the token that the network predicted after them.

    `predicted` has one token more than `guesses`: the prediction for each guess, and the token after the last one. The
    result has 1..len(predicted) tokens, of which all but the last were guessed.
    """
    right = 0
    while right < len(guesses) and guesses[right] == predicted[right]:
        right += 1
    return list(predicted[: right + 1])
