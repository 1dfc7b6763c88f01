"""Choose the drafts that a sequence feeds in its next step: those of its masks, or what its text and grammar suggest.

In:    The drafts that verification left from masks, the text of the sequence, and the price of positions.
Out:   The drafts with the larger expected gain. The next step verifies them, whatever their source.
Never: A draft from text is kept without verification. Answers that must be reproducible although they accept tokens
       without verification get none, because such an answer depends on where its masks stand.
"""

from collections import Counter
from collections.abc import Hashable

from mars_ray.engine.drafting.text_drafter import DRAFTS_MOST, SequenceText, TextDraft, TextDrafter
from mars_ray.engine.drafting.text_index import TextIndex
from mars_ray.engine.request import Request
from mars_ray.engine.scheduling.sequence import Drafts, Sequence
from mars_ray.engine.stats.state import DraftCounts
from mars_ray.method.drafts import PositionPrice

DRAFTS_PER_STEP = 128
"""Maximum number of drafts from text in a step. Each needs the logits of one position: 0.6 MB with a vocabulary of
150,000."""


class DraftChoice:
    """Drafts of the sequences of one engine, whose sequences have up to `max_model_len` tokens."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._drafter = TextDrafter()
        self._prompts: dict[str, TextIndex] = {}
        """Index of the prompt of each request with drafts from text."""
        self._drafted: Counter[str] = Counter()
        self._right: Counter[str] = Counter()

    def choose(self, sequence: Sequence, price: PositionPrice, running: int) -> None:
        """Replace the drafts of a sequence, which has just gained tokens, if its text suggests better ones.

        `running` is the number of sequences that share a step.
        """
        left = min(sequence.max_tokens - sequence.num_output_tokens, self._max_model_len - len(sequence.tokens)) - 1
        most = min(DRAFTS_MOST, DRAFTS_PER_STEP // running, left)
        if most <= 0 or price.of_position(0) >= 1:
            return
        text = self._draft_from_text(sequence, most)
        count, gain = text.worth(price)
        if any(text.features) and not any(text.features[:count]):
            self._drafter.refused()
        elif count and gain > _gain(sequence, price):
            stop = next((number for number, token in enumerate(text.tokens, 1) if token in sequence.stop_ids), count)
            text = text.first(min(count, stop))
            sequence.drafts = Drafts(text.tokens, text.confidences, text, sequence.drafts.probabilities)

    def verified(self, sequence: Sequence, right: int, tokens: int) -> None:
        """Count and learn from the drafts of a sequence, of which `right` were right, when it took `tokens` tokens."""
        drafts = sequence.drafts
        features = drafts.text.features if drafts.text else [None] * len(drafts.tokens)
        judged = min(tokens, len(drafts.tokens))
        for index in range(judged):
            source = "text" if features[index] else "masks" if sequence.matcher is None else "grammar"
            self._drafted[source] += 1
            self._right[source] += index < right
        if drafts.text:
            self._drafter.verified(drafts.text, right, judged)

    def counts(self) -> tuple[DraftCounts, ...]:
        """Return the drafts so far, by source."""
        return tuple(DraftCounts(source, self._drafted[source], self._right[source]) for source in self._drafted)

    def ended(self, sequence: Sequence, last: bool) -> None:
        """Let later sequences copy from one that has ended, the `last` of its request or not."""
        request = sequence.request
        if sequence.text:
            self._drafter.ended(_owner(request), sequence.tokens[len(request.prompt) :])
        if last:
            self._prompts.pop(request.id, None)

    def forget(self) -> None:
        """Forget all recent answers."""
        self._drafter.forget()

    def _draft_from_text(self, sequence: Sequence, most: int) -> TextDraft:
        request = sequence.request
        if sequence.text is None:
            sequence.text = SequenceText(self._prompts.setdefault(request.id, TextIndex()))
        return self._drafter.draft(
            sequence.text,
            request.prompt,
            sequence.tokens,
            _owner(request),
            request.sampling.temperature,
            most,
            sequence.matcher,
        )


def _owner(request: Request) -> Hashable:
    """Return the key of the recent answers that a request may copy from."""
    return request.tenant, request.service_class, request.decode.adapter


def _gain(sequence: Sequence, price: PositionPrice) -> float:
    """Return the tokens that drafts from masks are expected to gain beyond the cost of their positions.

    What a grammar forces gains and costs nothing (see `TextDraft.worth`).
    """
    right = 1.0
    gain = 0.0
    for number, probability in enumerate(sequence.drafts.probabilities):
        right *= probability
        if probability < 1 or sequence.matcher is None:
            gain += right - price.of_draft(number)
    return gain
