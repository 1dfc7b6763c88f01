"""Commit what a step gave a sequence: advance its state, settle its text, and tell the profile what was learned.

No token is chosen here, and none that left the engine is ever taken back.
"""

from dataclasses import dataclass

from mars_ray.engine.chunk import Audit, FinishReason
from mars_ray.engine.execution.model_runner import ForwardOutput
from mars_ray.engine.grammar.matcher import Matcher
from mars_ray.engine.request import LOSSLESS, Acceptance
from mars_ray.engine.sampling.verify import Verification
from mars_ray.engine.scheduling.scheduler import ScheduledSequence
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.engine.stats.profile import Profile
from mars_ray.method.metric import Metric


@dataclass(frozen=True, slots=True)
class Emitted:
    """What a sequence gives out after a step: text, tokens and reason end at the same token."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """The text each token settled."""
    reason: FinishReason | None
    """Set once the sequence has ended."""
    starts: tuple[int | None, ...]
    """Where log-probabilities are asked for, for each token the character its text begins at (see `TokenLogprobs`)."""


def picks_of(scheduled: ScheduledSequence, picks: slice) -> slice:
    """Return which of a sequence's picked positions choose tokens: the last token, the drafts and the masks.

    The positions before them are read for an audit only.
    """
    if not scheduled.has_logits:
        return picks
    return slice(picks.stop - scheduled.num_drafts - scheduled.num_masks - 1, picks.stop)


def chosen_picks(scheduled: ScheduledSequence, picks: slice, found: Verification) -> list[int]:
    """Return the picked positions at which the tokens of a sequence were chosen: verified ones, then those at masks."""
    first = picks_of(scheduled, picks)
    masks = scheduled.mask_picks(first, found.num_accepted_drafts)
    return [*range(first.start, first.start + len(found.verified)), *masks]


def advance(sequence: Sequence, found: Verification) -> Emitted:
    """Commit the outcome of a step, and end the sequence where it ends. Drafts wait for the next forward."""
    gained, sequence.draft_tokens = found.verified + found.accepted, found.drafted
    sequence.accepted_confidences = found.confidences[: len(found.accepted)]
    sequence.draft_confidences = found.confidences[len(found.accepted) :]
    ended = False
    if sequence.matcher is not None and gained[-1] not in sequence.stop_ids:
        gained, ended = _follow_grammar(sequence, sequence.matcher, gained)
    # The tokens that were fed are in the cache now, and of the drafts the right ones; what masks and wrong drafts left
    # there is written over.
    sequence.num_computed_tokens = len(sequence.tokens) + found.num_accepted_drafts
    sequence.forwards += 1
    emitted = _emit(sequence, gained, ended)
    sequence.tokens += emitted.tokens
    sequence.num_computed_tokens = min(sequence.num_computed_tokens, len(sequence.tokens))
    return emitted


def _follow_grammar(sequence: Sequence, matcher: Matcher, gained: list[int]) -> tuple[list[int], bool]:
    """Settle `gained` in the grammar; return it with what the grammar forces behind it, and whether that is the end.

    Log-probabilities need logits: where they are asked for, what is forced is fed as drafts instead.
    """
    sampling = sequence.request.sampling
    matcher.seek(gained)
    forced = matcher.take_forced(sequence.max_tokens - sequence.num_output_tokens - len(gained))
    if sampling.logprobs is None:
        gained = gained + forced
        sequence.draft_tokens = sequence.draft_tokens[len(forced) :]
    else:
        matcher.seek(gained)
        sequence.draft_tokens = max(sequence.draft_tokens, forced, key=len)  # the one begins with the other
    # An audit would take tokens that the grammar chose for tokens that the model chose.
    sequence.accepted_confidences, sequence.draft_confidences = [], []
    matcher.settle()
    return gained, matcher.ended


def _emit(sequence: Sequence, gained: list[int], ended: bool) -> Emitted:
    """Find where `gained` ends, at a stop token, a stop string or the limit, and the text up to there.

    `ended` tells that nothing can follow it.
    """
    sampling, number, text = sequence.request.sampling, sequence.num_output_tokens, sequence.detokenizer
    pieces, starts = list[str](), list[int | None]()
    reason: FinishReason | None = None
    for count, token in enumerate(gained, start=1):
        stop = token in sequence.stop_ids
        if sampling.logprobs is not None:
            starts.append(None if stop else text.start_of(token))
        pieces.append("" if stop else text.push(token, may_stop=number + count > sampling.min_tokens))
        if stop or text.stopped or (ended and count == len(gained)):
            reason = "stop"
        elif number + count == sequence.max_tokens:
            reason = "length"
        if reason is not None:
            pieces[-1] += text.finish()  # nothing, if it was a stop string
            break
    return Emitted(tuple(gained[: len(pieces)]), tuple(pieces), reason, tuple(starts))


def record(
    profile: Profile,
    scheduled: ScheduledSequence,
    picks: slice,
    found: Verification,
    output: ForwardOutput,
    acceptance: Acceptance | None,
    draft_price: float,
) -> None:
    """Tell the profile the confidences at the masks that were read, and which tokens ahead were right.

    `draft_price` is that of `verify`. Called before the sequence advances.
    """
    if acceptance is None or acceptance.metric is not Metric.PROBABILITY:
        return
    sequence = scheduled.sequence
    if scheduled.num_masks:
        _record_masks(profile, scheduled, picks_of(scheduled, picks), found, output, draft_price)
    if sequence.draft_confidences:  # none where a grammar forced the drafts
        # A draft that is a stop token counts as the autoregressive token of the forward that verifies it, the last.
        judged = len(sequence.draft_tokens) - (sequence.draft_tokens[-1] in sequence.stop_ids)
        drafts, right = sequence.draft_confidences[:judged], min(found.num_accepted_drafts, judged)
        profile.observe_drafts(drafts, right, after=len(sequence.accepted_confidences))
        if not sequence.accepted_confidences and acceptance == LOSSLESS:
            profile.observe_audit(0.0, drafts, [True] * right + [False])
    if audits := audits_of(scheduled, picks, output):
        agreed = [audit.token == token for audit, token in zip(audits, sequence.tokens[-len(audits) :], strict=True)]
        profile.observe_audit(acceptance.threshold, sequence.accepted_confidences, agreed)


def _record_masks(
    profile: Profile,
    scheduled: ScheduledSequence,
    picks: slice,
    found: Verification,
    output: ForwardOutput,
    draft_price: float,
) -> None:
    """Tell the profile the confidences at masks, up to a stop token that would end the sequence."""
    row = scheduled.mask_picks(picks, found.num_accepted_drafts)
    ended = found.verified[-1] in scheduled.sequence.stop_ids  # nothing is left to look ahead to
    profile.observe_rows(
        scheduled.masks, read=bool(row) or ended, surprised=found.num_accepted_drafts < scheduled.num_drafts
    )
    if not row:
        return  # masks behind a wrong draft are void
    confidences = output.confidences[row.start : row.stop]
    tokens = [output.tokens[picks.start + found.num_accepted_drafts], *output.tokens[row.start : row.stop]]
    # The first of these is autoregressive, so up to a stop token there are as many masks as tokens before it.
    reached = next((number for number, token in enumerate(tokens) if token in scheduled.sequence.stop_ids), None)
    profile.observe_masks(len(row), confidences[:reached], draft_price, ends=reached is not None)


def audits_of(scheduled: ScheduledSequence, picks: slice, output: ForwardOutput) -> tuple[Audit, ...]:
    """Return what the model says now of the tokens accepted at masks a forward ago, where their logits are read.

    Called before the sequence advances.
    """
    sequence = scheduled.sequence
    ahead, first = len(sequence.accepted_confidences), picks_of(scheduled, picks).start
    if sequence.request.sampling.temperature or first - picks.start < ahead:
        return ()
    read, index = slice(first - ahead, first), sequence.num_output_tokens - ahead
    said = zip(output.tokens[read], output.confidences[read], strict=True)
    return tuple(Audit(number, token, confidence) for number, (token, confidence) in enumerate(said, index))
