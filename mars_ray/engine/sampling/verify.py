"""Verify the drafts of a sequence, take the next token, accept tokens at masks, and draft the rest: one step.

Proposals are read left to right and lazily, so that each may depend on those taken before it in the same step: which
masks are read depends on how many drafts were right. No logit is looked at here.

Sources: threshold acceptance, arXiv 2604.07023, section 3.3; verification, arXiv 2211.17192, with the draw at a
position shared by draft and target (see `sampler`), so that a draft is right or wrong and nothing is left to chance.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mars_ray.engine.request import Acceptance
from mars_ray.method.metric import least_probability


class Proposal(NamedTuple):
    """The token chosen at one position under the constraints of the sequence."""

    token: int
    confidence: float
    is_argmax: bool
    """Whether the token is the model's own most likely one. What stands behind masks was proposed on the assumption
    that it would be; behind a token that a draw, a penalty, a bias or a grammar put there nothing more is accepted."""


PlainProposal = Proposal | tuple[int, float, bool]


@dataclass(frozen=True, slots=True)
class Proposals:
    """What is proposed for one sequence in a step."""

    verifying: Iterator[PlainProposal]
    """Behind the last token and behind each draft."""
    at_masks: Callable[[int], Iterable[PlainProposal]]
    """At the masks behind so many right drafts; nothing where there are none. Called once, behind what was verified."""


@dataclass(slots=True)
class Verification:
    """What one step gave one sequence."""

    verified: list[int]
    """Tokens the model itself chooses, given all before them: the right drafts and one more. At least one token."""
    accepted: list[int] = field(default_factory=list)
    """Tokens at masks, after `verified`, whose confidences pass the threshold."""
    drafted: list[int] = field(default_factory=list)
    """Tokens at masks after those, from the first that falls short on: the next forward verifies them."""
    confidences: list[float] = field(default_factory=list)
    """Confidences of `accepted` and then of `drafted`, in the metric of the request."""
    num_accepted_drafts: int = 0
    """How many drafts of the step before were right."""


def verify(
    proposals: Proposals,
    draft_tokens: Sequence[int],
    needs: Acceptance,
    draft_price: float,
    stop_ids: frozenset[int],
    max_tokens: int,
) -> Verification:
    """Verify `draft_tokens`, take the autoregressive token, accept at masks while the confidence passes, then draft.

    Tokens are drafted while all of them are right with a probability of at least `draft_price`, which is the number of
    tokens that a draft must gain to pay for its positions.

    At most `max_tokens` are taken, and nothing after a stop token. Where the proposals end early, nothing can follow.
    """
    result = Verification([])
    for number in range(len(draft_tokens) + 1):
        proposal = next(proposals.verifying, None)
        if proposal is None:
            return result
        token, _, is_argmax = proposal
        result.verified.append(token)
        right = number < len(draft_tokens) and token == draft_tokens[number]
        result.num_accepted_drafts += right
        if token in stop_ids or len(result.verified) == max_tokens:
            return result
        if not right:
            break  # the drafts behind it are void
    coming = iter(proposals.at_masks(result.num_accepted_drafts))
    left = max_tokens - len(result.verified)
    all_right = 1.0
    while left and is_argmax:
        proposal = next(coming, None)
        if proposal is None:
            break
        token, confidence, is_argmax = proposal
        if not result.drafted and needs.accepts(confidence):
            result.accepted.append(token)
        else:
            all_right *= least_probability(confidence, needs.metric)
            if all_right < draft_price:
                break
            result.drafted.append(token)
        result.confidences.append(confidence)
        if token in stop_ids:
            break
        left -= 1
    return result
