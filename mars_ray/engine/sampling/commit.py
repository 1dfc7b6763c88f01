"""What a walk gave -> the state of the sequence, the text that leaves, the figures of the profile.

In:    a feed, its walk.
Out:   an advanced sequence and what it emits; nothing of it is ever taken back.
Never: chooses a token.
"""

from dataclasses import dataclass

from mars_ray.engine.chunk import FinishReason
from mars_ray.engine.execution.model_runner import Window
from mars_ray.engine.grammar.matcher import Matcher
from mars_ray.engine.request import DRAFT_THRESHOLD, LOSSLESS, Acceptance
from mars_ray.engine.sampling.verify import Walk
from mars_ray.engine.scheduling.scheduler import Feed
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.stats.profile import Profile
from mars_ray.method.metric import Metric


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a sequence says after a step: text, tokens and reason end at the same token."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """The text each token settled."""
    reason: FinishReason | None
    """Set once the sequence has ended."""
    starts: tuple[int | None, ...]
    """Where log-probabilities are asked for, for each token the character its text begins at (see `TokenLogprobs`)."""


def picks_of(feed: Feed, where: slice) -> slice:
    """Return the picks behind the last token, the drafts and the masks; those before them are audited ones."""
    return slice(where.stop - feed.drafts - feed.masks - 1, where.stop) if feed.complete else where


def advance(sequence: Sequence, walked: Walk, *, verified: bool) -> Emitted:
    """Commit a walk, and end the sequence where it ends. `verified`: what was drafted waits for the next forward."""
    if verified:
        gained, sequence.drafts = walked.kept, walked.drafted
    else:
        gained, sequence.drafts = walked.kept + walked.drafted, []
    sequence.looked_ahead = walked.confidences
    ended = False
    if sequence.matcher is not None and gained[-1] not in sequence.stop_ids:
        gained, ended = _follow(sequence, sequence.matcher, gained)
    # Everything fed is cached now, and of the drafts those that were right; masks and wrong drafts are written over.
    sequence.cached = len(sequence.tokens) + walked.agreed
    sequence.forwards += 1
    emitted = _emit(sequence, gained, ended)
    sequence.tokens += emitted.tokens
    sequence.cached = min(sequence.cached, len(sequence.tokens))
    return emitted


def _follow(sequence: Sequence, matcher: Matcher, gained: list[int]) -> tuple[list[int], bool]:
    """Settle `gained` in the grammar; return it with what the grammar forces behind it, and whether that is the end.

    Log-probabilities need logits: where they are asked for, what is forced is fed as drafts instead.
    """
    sampling = sequence.request.sampling
    matcher.seek(gained)
    forced = matcher.take_forced(sequence.limit - sequence.generated - len(gained))
    if sampling.logprobs is None:
        gained = gained + forced
        sequence.drafts = sequence.drafts[len(forced) :]
    else:
        matcher.seek(gained)
        sequence.drafts = max(sequence.drafts, forced, key=len)  # the one begins with the other
    sequence.looked_ahead = []  # an audit would take what the grammar says for what the model says
    matcher.settle()
    return gained, matcher.ended


def _emit(sequence: Sequence, gained: list[int], ended: bool) -> Emitted:
    """Find where `gained` ends, at a stop token, a stop string or the limit, and the text up to there.

    `ended` says that nothing can follow it.
    """
    sampling, number, text = sequence.request.sampling, sequence.generated, sequence.text
    pieces, starts = list[str](), list[int | None]()
    reason: FinishReason | None = None
    for count, token in enumerate(gained, start=1):
        stop = token in sequence.stop_ids
        if sampling.logprobs is not None:
            starts.append(None if stop else text.start_of(token))
        pieces.append("" if stop else text.push(token, may_stop=number + count > sampling.min_tokens))
        if stop or text.stopped or (ended and count == len(gained)):
            reason = "stop"
        elif number + count == sequence.limit:
            reason = "length"
        if reason is not None:
            pieces[-1] += text.finish()  # nothing, if it was a stop string
            break
    return Emitted(tuple(gained[: len(pieces)]), tuple(pieces), reason, tuple(starts))


def record(
    profile: Profile, feed: Feed, where: slice, walked: Walk, window: Window, acceptance: Acceptance | None
) -> None:
    """Tell the profile what the masks would have given at every threshold, and which looks ahead were right.

    Called before the sequence advances.
    """
    sequence, picks = feed.sequence, picks_of(feed, where)
    if acceptance is None or acceptance.metric is not Metric.PROBABILITY:
        return
    if feed.masks and walked.agreed == feed.drafts:  # or what stands at the masks is void
        sure = window.confidences[picks.stop - feed.masks : picks.stop]
        tokens = window.tokens[picks.start + feed.drafts : picks.stop]
        # The first of these is autoregressive, so up to a stop token there are as many masks as tokens before it.
        reached = next((number for number, token in enumerate(tokens) if token in sequence.stop_ids), len(tokens))
        if acceptance == LOSSLESS and sequence.matcher is None:  # a grammar's own tokens are no drafts of the model
            drafted = len(walked.drafted)
        else:
            drafted = next((number for number, each in enumerate(sure) if each < DRAFT_THRESHOLD), feed.masks)
        # A stop token that was drafted counts as the autoregressive one of the forward that verifies it, the last.
        profile.observe(feed.masks, sure[:reached], min(drafted, max(reached - 1, 0)), ended=drafted >= reached > 0)
    ahead = sequence.looked_ahead
    if feed.drafts:
        if ahead:
            judged = len(ahead) - (sequence.drafts[-1] in sequence.stop_ids)
            right = min(walked.agreed, judged)
            profile.audit(acceptance.threshold, ahead[:judged], [True] * right + [False])
            if acceptance == LOSSLESS:
                profile.verify(judged, right)
    elif ahead and sequence.request.sampling.temperature == 0 and picks.start - where.start >= len(ahead):
        said = window.tokens[picks.start - len(ahead) : picks.start]
        agrees = [now == then for now, then in zip(said, sequence.tokens[-len(ahead) :], strict=True)]
        profile.audit(acceptance.threshold, ahead, agrees)
