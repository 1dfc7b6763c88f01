"""Decode the tokens of a sequence into text one at a time, and end the text at a stop string.

Only settled text is returned: no incomplete characters, and nothing that may still become part of a stop string.
Returned text never changes later.
"""

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from mars_ray.engine.begun_marker import begun_marker


class IncrementalDetokenizer:
    """The text of one sequence. The joined results of `push` and `finish` equal the text that the tokenizer decodes,
    unless bytes that are no UTF-8 change characters before them, which stay as they were.

    The text ends before a stop string, whether it lies in one token or across several tokens or steps.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = stop
        self._decoder = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._tokens: list[int] = []
        """Tokens that the decoder has taken."""
        self._text_before = 0
        """Number of characters that earlier decoders have returned."""
        self._settled = 0
        """Number of characters that all decoders have returned."""
        self._held = ""
        """Last characters from the decoder, which may become part of a stop string."""
        self._may_stop = True
        self._special: frozenset[int] | None = None
        self.stopped = False
        """True once the text has ended at a stop string."""

    def start_of(self, token: int) -> int | None:
        """Return the index of the character at which the next token's text begins; None if it adds none."""
        if self._special is None:
            added = self._tokenizer.added_tokens_decoder
            special = (token_id for token_id, details in added.items() if details.special)
            self._special = frozenset(special if self._skip_special_tokens else ())
        return None if token in self._special else self._settled

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Add a token and return the text that it settles. Without `may_stop`, stop strings are ignored."""
        self._may_stop = may_stop
        try:
            text = self._decoder.step(self._tokenizer.backend_tokenizer, token)
        except Exception:  # bytes that are no UTF-8 have changed characters before them, which are out already
            self._decoder = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            self._tokens = []
            self._text_before = self._settled
            text = self._decoder.step(self._tokenizer.backend_tokenizer, token)
        self._tokens.append(token)
        return self._settle(text or "", may_stop)

    def finish(self) -> str:
        """Return the text held back so far. No token may be pushed afterwards."""
        if self.stopped:
            return ""
        # Decode all tokens again, so that incomplete bytes at the end become the replacement character.
        decoded: str = self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip_special_tokens)
        text = self._settle(decoded[self._settled - self._text_before :], may_stop=self._may_stop)
        text += self._held
        self._held = ""
        return text

    def _settle(self, text: str, may_stop: bool) -> str:
        self._settled += len(text)
        if not self._stop:
            return text
        text = self._held + text
        if may_stop:
            starts = [start for start in map(text.find, self._stop) if start >= 0]
            if starts:
                self.stopped = True
                self._held = ""
                return text[: min(starts)]
        keep = begun_marker(text, self._stop) if may_stop else 0
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
