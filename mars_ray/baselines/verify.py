"""Greedy verification: which guesses are the tokens that autoregressive decoding gives there."""

from collections.abc import Sequence


def verified(guesses: Sequence[int], says: Sequence[int]) -> list[int]:
    """Return the right guesses, up to the first wrong one, and the token the network says in place of that.

    `says` has one token more than `guesses`: before each of them, and after the last. So 1..len(says) tokens are
    returned, of which all but the last were guessed.
    """
    right = 0
    while right < len(guesses) and guesses[right] == says[right]:
        right += 1
    return list(says[: right + 1])
