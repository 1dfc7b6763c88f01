"""Recent answers, by their owner: text that new answers of the same owner may repeat.

In:    Answers that have ended, each with a key such as tenant, class and adapter.
Out:   Matches in the recent answers of one key.
Never: The answers of one key never draft for another, and all keys together never hold more than `max_tokens` tokens.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence

from mars_ray.engine.drafting.text_index import BYTES_PER_TOKEN, TextIndex, TextMatch

MAX_TOKENS = (32 << 20) // BYTES_PER_TOKEN
"""Default number of tokens, which take up to 32 MiB."""


class RecentAnswers:
    """The latest answers of each key.

    Each key has an older and a newer index. When the newer one is full, it becomes the older one, and the former older
    one is dropped with the oldest answers. Removing single answers would take time in proportion to the index.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_of_index = max_tokens // 2
        self._by_key: OrderedDict[Hashable, tuple[TextIndex, TextIndex]] = OrderedDict()
        """Older and newer index of each key, in the order of their last answers."""
        self.num_tokens = 0
        """Number of tokens of all keys, borders between answers included."""

    def add(self, key: Hashable, answer: Sequence[int]) -> None:
        """Add an answer. Keys whose last answers are the oldest are forgotten until there is room for it."""
        answer = answer[: self._max_of_index - 1]
        older, newer = self._by_key.pop(key, (TextIndex(), TextIndex()))
        if len(newer.tokens) + len(answer) + 1 > self._max_of_index:
            self.num_tokens -= len(older.tokens)
            older, newer = newer, TextIndex()
        newer.extend(answer)
        newer.end_text()
        self.num_tokens += len(answer) + 1
        self._by_key[key] = older, newer
        while self.num_tokens > 2 * self._max_of_index:
            _, forgotten = self._by_key.popitem(last=False)
            self.num_tokens -= sum(len(index.tokens) for index in forgotten)

    def find(self, key: Hashable, tokens: Sequence[int]) -> tuple[TextIndex, TextMatch] | None:
        """Return the longest match for the end of `tokens` in the answers of `key`, among equals the latest."""
        longest = None
        for index in self._by_key.get(key, ()):
            match = index.find(tokens)
            if match and (longest is None or match.length >= longest[1].length):
                longest = index, match
        return longest
