"""Verify the drafts of a sequence, take the next token, accept tokens at masks, and draft the rest, in one step.

Proposals are read lazily from left to right, because each may depend on the tokens taken before it in the same step,
and because the number of right drafts decides which masks are read.

Sources: threshold acceptance, arXiv 2604.07023, section 3.3; verification and lenience, arXiv 2211.17192. A draft and
its verification share the draw at a position (see `sampler`), so verification needs no randomness of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mars_ray.engine.request import Acceptance
from mars_ray.engine.scheduling.sequence import Drafts
from mars_ray.method.drafts import PositionPrice
from mars_ray.method.metric import least_probability


class Proposal(NamedTuple):
    """Token proposed at one position under the constraints of the sequence."""

    token: int
    confidence: float
    is_argmax: bool
    """True if the token is the most likely one by the raw logits. Predictions at later masks assume that the most
    likely token is taken, so nothing is accepted after a token that a draw, a penalty, a bias or a grammar changed."""


PlainProposal = Proposal | tuple[int, float, bool]


@dataclass(frozen=True, slots=True)
class Proposals:
    """Tokens proposed for one sequence in a step: where its drafts are verified, and at its masks."""

    verifying: Iterator[PlainProposal]
    """Proposals after the last token and after each draft."""
    at_masks: Callable[[int], Iterable[PlainProposal]]
    """Return the proposals at the masks after this number of right drafts. Called at most once, after `verifying` has
    been read."""
    ratio: Callable[[int, int], float] | None = None
    """Return the ratio of a draft, given its index and token: its probability divided by that of the most likely token.
    None if only the proposed token may be taken, because later proposals depend on it."""


@dataclass(slots=True)
class Verification:
    """Outcome of a step for one sequence."""

    verified: list[int]
    """Right drafts and the autoregressive token after them. At least one token unless the grammar has ended."""
    accepted: list[int] = field(default_factory=list)
    """Tokens at masks, after `verified`, whose confidences pass the threshold."""
    accepted_confidences: list[float] = field(default_factory=list)
    """Confidences of `accepted`, in the metric of the request."""
    drafts: Drafts = field(default_factory=Drafts)
    """Tokens at masks after `accepted`, beginning with the first that falls short of the threshold."""
    num_accepted_drafts: int = 0
    """Number of drafts of the previous step that were right, or kept by lenience."""
    ratios: list[float] = field(default_factory=list)
    """Probability of each judged draft, divided by that of the most likely token: 1 for a right one; 0 for a wrong one
    if the threshold does not apply to drafts."""
    kept: list[int] = field(default_factory=list)
    """Indices of the drafts that were kept by lenience in place of the model's choice."""
    prediction: tuple[int, float] | None = None
    """Token at the first mask and its probability; None without masks. It is None, too, where tokens may be accepted at
    masks, because only unlikely tokens would be verified."""


def verify(
    proposals: Proposals,
    draft_tokens: Sequence[int],
    acceptance: Acceptance,
    price: PositionPrice,
    stop_ids: frozenset[int],
    max_tokens: int,
) -> Verification:
    """Verify `draft_tokens`, take the autoregressive token, accept tokens at masks, and draft the rest.

    Tokens at masks are accepted until a confidence falls short of the threshold. Further tokens are drafted while the
    probability that all drafts are right is at least the `price` of one more draft. If the threshold applies to drafts,
    a draft whose ratio reaches it counts as right.

    At most `max_tokens` tokens are taken, and none after a stop token or the end of a grammar.
    """
    result = Verification([])
    for index in range(len(draft_tokens) + 1):
        proposal = next(proposals.verifying, None)
        if proposal is None:
            return result
        token, _, is_argmax = proposal
        right = False
        if index < len(draft_tokens):
            draft = draft_tokens[index]
            ratio = 1.0 if token == draft else _ratio(proposals, index, draft, acceptance)
            result.ratios.append(ratio)
            right = token == draft or acceptance.keeps(ratio)
            if right and token != draft:
                token, is_argmax = draft, True  # predictions after a draft assume the draft
                result.kept.append(index)
        result.verified.append(token)
        result.num_accepted_drafts += right
        if token in stop_ids or len(result.verified) == max_tokens:
            return result
        if not right:
            break  # the drafts after it are void
    masked = iter(proposals.at_masks(result.num_accepted_drafts))
    left = max_tokens - len(result.verified)
    all_right = 1.0
    while left and is_argmax:
        proposal = next(masked, None)
        if proposal is None:
            break
        token, confidence, is_argmax = proposal
        if not result.drafts.tokens and acceptance.accepts(confidence):
            result.accepted.append(token)
            result.accepted_confidences.append(confidence)
        else:
            probability = least_probability(confidence, acceptance.metric)
            if (acceptance.lossless or acceptance.lenient) and not result.drafts.tokens:
                result.prediction = token, probability
            all_right *= probability
            if all_right < price.of_draft(len(result.drafts.tokens)):
                break
            result.drafts.tokens.append(token)
            result.drafts.probabilities.append(probability)
        if token in stop_ids:
            break
        left -= 1
    return result


def _ratio(proposals: Proposals, index: int, draft: int, acceptance: Acceptance) -> float:
    """Return the ratio of a draft that is not the proposed token; 0 if it makes no difference."""
    return proposals.ratio(index, draft) if acceptance.lenient and proposals.ratio else 0.0
