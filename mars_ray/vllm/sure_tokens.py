"""Limit which tokens of a request may enter vLLM's shared prefix cache.

vLLM enters blocks of accepted tokens at once. Tokens accepted at masks get their keys one step later, and a request
that ends leaves them without keys. Another request would then read the keys of masks. The tokens that were known before
a request's last step have their keys after it, because a step feeds all known tokens.
"""

from weakref import WeakKeyDictionary


class SureTokens:
    """Numbers of tokens that surely have keys, by request."""

    def __init__(self) -> None:
        self._sure: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def step_ended(self, request: object, known: int) -> None:
        """Note that a step of `request` ended, before which `known` tokens were known."""
        self._sure[request] = known

    def limit(self, request: object, tokens: int) -> int:
        """Return how many of the first `tokens` tokens may be shared. Prompts that are being read have no limit."""
        return min(tokens, self._sure.get(request, tokens))
