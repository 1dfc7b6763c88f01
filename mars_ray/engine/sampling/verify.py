"""The left-to-right walk over what one forward proposed: which tokens a sequence keeps.

In:    proposals in order of position, lazily, so that each may depend on those kept before it in the same step.
Out:   tokens that are settled, and in exact mode drafts that the next forward will verify.
Never: looks at a logit.

Sources: threshold acceptance, arXiv 2604.07023, section 3.3; verification, arXiv 2211.17192, with the draw at a
position shared by draft and target (see `choose`), so that a draft is right or wrong and nothing is left to chance.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mars_ray.method.metric import Metric, passes


class Proposal(NamedTuple):
    """What the logits at one position say under the constraints of the sequence."""

    token: int
    confidence: float
    foreseen: bool
    """Whether the token is the model's own most likely one. What stands behind masks was proposed on the assumption
    that it would be; a token that a draw, a penalty, a bias or a grammar put there instead ends the walk."""


@dataclass(slots=True)
class Walk:
    """The outcome for one sequence in one step."""

    kept: list[int]
    """At least one token."""
    drafted: list[int] = field(default_factory=list)
    """Accepted at masks, behind `kept`."""
    confidences: list[float] = field(default_factory=list)
    """The least confidence in the draft up to each of `drafted`, in the metric of the request."""
    agreed: int = 0
    """How many drafts of the step before were what the model says now."""


def walk(
    proposals: Iterable[Proposal | tuple[int, float, bool]],
    drafts: Sequence[int],
    threshold: float,
    metric: Metric,
    stop_ids: frozenset[int],
    room: int,
) -> Walk:
    """Verify `drafts`, take the autoregressive token, then accept at masks while the confidence passes.

    `proposals` are those behind the last token and behind each draft, then those at the masks. At most `room` tokens
    are kept and drafted, and nothing behind a stop token. Where the proposals end early, nothing can follow.
    """
    coming = iter(proposals)
    done = Walk([])
    for number in range(len(drafts) + 1):
        proposal = next(coming, None)
        if proposal is None:
            return done
        token, _, foreseen = proposal
        done.kept.append(token)
        right = number < len(drafts) and token == drafts[number]
        done.agreed += right
        if token in stop_ids or len(done.kept) == room:
            return done
        if number < len(drafts) and not right:
            return done  # what was proposed behind a wrong draft is void
    room -= len(done.kept)
    least: float | None = None
    while room and foreseen:
        proposal = next(coming, None)
        if proposal is None:
            break
        token, confidence, foreseen = proposal
        if not passes(confidence, threshold, metric):
            break
        worse = max if metric is Metric.ENTROPY else min
        least = confidence if least is None else worse(least, confidence)
        done.drafted.append(token)
        done.confidences.append(least)
        if token in stop_ids:
            break
        room -= 1
    return done
