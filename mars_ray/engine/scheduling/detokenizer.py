"""Turn tokens into text as they come, and find where a stop string ends it.

Only settled text is given out: no half characters, nothing that may yet become part of a stop string. None of it is
taken back.
"""

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase


class IncrementalDetokenizer:
    """The text of one sequence. All that `push` and `finish` return, joined, is what the tokenizer decodes.

    A stop string ends the text before it, wherever it lies: in one token, across several, or across two steps.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._settled = 0
        """Number of characters the decoder has given."""
        self._held = ""
        """The last characters the decoder gave, as far as they may become a stop string."""
        self._may_stop = True
        self._special: frozenset[int] | None = None
        self.stopped = False

    def start_of(self, token: int) -> int | None:
        """Return the character at which the text of `token`, to be pushed next, begins; None if it never has any."""
        if self._special is None:
            added = self._tokenizer.added_tokens_decoder
            self._special = frozenset(number for number, each in added.items() if each.special)
        return None if token in self._special else self._settled

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Return the text that `token` settles. `stopped` then says whether a stop string is complete."""
        self._tokens.append(token)
        self._may_stop = may_stop
        return self._settle(self._decoder.step(self._tokenizer.backend_tokenizer, token) or "", may_stop)

    def finish(self) -> str:
        """Return what was held back: nothing more will come that could complete it."""
        if self.stopped:
            return ""
        # Bytes that never became a character are decoded as the replacement character, as in one call for all tokens.
        decoded: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        text = self._settle(decoded[self._settled :], may_stop=self._may_stop)
        text, self._held = text + self._held, ""
        return text

    def _settle(self, text: str, may_stop: bool) -> str:
        self._settled += len(text)
        if not self._stop:
            return text
        text = self._held + text
        if may_stop:
            found = [place for place in map(text.find, self._stop) if place >= 0]
            if found:
                self.stopped, self._held = True, ""
                return text[: min(found)]
        keep = _beginning_of_a_stop(text, self._stop) if may_stop else 0
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _beginning_of_a_stop(text: str, stops: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text` are the beginning of a stop string."""
    longest = max(map(len, stops)) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(stop.startswith(tail) for stop in stops):
            return length
    return 0
