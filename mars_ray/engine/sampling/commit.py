"""Commit the outcome of a step to a sequence: advance its state, settle its text, and record it in the profile.

In:    It takes the tokens that `verify` chose.
Out:   It gives the tokens and the text to return.
Never: It never takes back a returned token.
"""

from dataclasses import dataclass, replace

from mars_ray.engine.chunk import Audit, FinishReason
from mars_ray.engine.execution.model_runner import ForwardOutput, Picks
from mars_ray.engine.grammar.matcher import Matcher
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import Acceptance
from mars_ray.engine.sampling.sampler import has_penalties
from mars_ray.engine.sampling.verify import Verification
from mars_ray.engine.scheduling.scheduler import ScheduledSequence
from mars_ray.engine.scheduling.sequence import FORCED_DRAFTS, Drafts, Sequence
from mars_ray.engine.stats.profile import Profile
from mars_ray.method.drafts import PositionPrice
from mars_ray.method.metric import Metric, least_probability


@dataclass(frozen=True, slots=True)
class Emitted:
    """Output of a sequence after a step. Text, tokens and finish reason all end at the same token."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]
    """Text that became final with each token."""
    reason: FinishReason | None
    """Finish reason; None while the sequence goes on."""
    starts: tuple[int | None, ...]
    """Character at which the text of each token begins (see `TokenLogprobs`). Empty if the request does not ask for
    log-probabilities."""
    accepted: int = 0
    """Number of tokens kept because of the threshold: accepted at masks without verification, or drafts that are not
    the model's own choice."""


def chosen_picks(picks: Picks, verification: Verification) -> list[int]:
    """Return the picks at which the tokens of a sequence were chosen: verified tokens first, then tokens at masks."""
    return [*picks.verifying[: len(verification.verified)], *picks.masks[verification.num_accepted_drafts]]


def advance(sequence: Sequence, verification: Verification) -> Emitted:
    """Commit the outcome of a step, and cut the tokens where the sequence ends. Drafts wait for the next forward."""
    gained = verification.verified + verification.accepted
    sequence.accepted_confidences = verification.accepted_confidences
    sequence.drafts = verification.drafts
    ended = False
    if sequence.matcher is not None and gained[-1] not in sequence.stop_ids:
        gained, ended = _follow_grammar(sequence, sequence.matcher, gained)
    # The cache now holds the fed tokens and the right drafts. Entries of masks and wrong drafts will be overwritten.
    sequence.num_computed_tokens = len(sequence.tokens) + verification.num_accepted_drafts
    sequence.forwards += 1
    emitted = emit(sequence, gained, ended)
    sequence.tokens += emitted.tokens
    # A forced token takes the place that the prediction is for.
    is_next = len(emitted.tokens) == len(verification.verified)
    sequence.prediction = verification.prediction if is_next else None
    sequence.num_computed_tokens = min(sequence.num_computed_tokens, len(sequence.tokens))
    unverified = len(emitted.tokens) - len(verification.verified)
    kept = sum(index < len(emitted.tokens) for index in verification.kept)
    return replace(emitted, accepted=kept + max(0, min(unverified, len(verification.accepted))))


def _follow_grammar(sequence: Sequence, matcher: Matcher, gained: list[int]) -> tuple[list[int], bool]:
    """Settle `gained` in the grammar. Return `gained` plus any forced tokens, and whether the grammar has ended.

    If the request asks for log-probabilities, the forced tokens are fed as drafts instead, because log-probabilities
    need logits.
    """
    sampling = sequence.request.sampling
    matcher.seek(gained)
    room = sequence.max_tokens - sequence.num_output_tokens - len(gained)
    forced = matcher.take_forced(room if sampling.logprobs is None else min(FORCED_DRAFTS, room))
    predicted = sequence.drafts
    # Without confidences there is no audit. An audit would mistake tokens of the grammar for choices of the model.
    sequence.accepted_confidences = []
    if sampling.logprobs is None:
        gained = gained + forced
        sequence.drafts = predicted.after(len(forced))
    else:
        matcher.seek(gained)
        if len(forced) > len(predicted.tokens):  # the longer list begins with the shorter
            sequence.drafts = Drafts.certain(forced)
    matcher.settle()
    return gained, matcher.ended


def emit(sequence: Sequence, gained: list[int], ended: bool) -> Emitted:
    """Cut `gained` at a stop token, a stop string or the token limit, and return the remaining tokens and their text.

    `ended` means that nothing can follow `gained`.
    """
    sampling = sequence.request.sampling
    output_tokens = sequence.num_output_tokens
    text = sequence.detokenizer
    pieces: list[str] = []
    starts: list[int | None] = []
    reason: FinishReason | None = None
    for count, token in enumerate(gained, start=1):
        stop = token in sequence.stop_ids
        if sampling.logprobs is not None:
            starts.append(None if stop else text.start_of(token))
        pieces.append("" if stop else text.push(token, may_stop=output_tokens + count > sampling.min_tokens))
        if stop or text.stopped or (ended and count == len(gained)):
            reason = "stop"
        elif output_tokens + count == sequence.max_tokens:
            reason = "length"
        if reason is not None:
            pieces[-1] += text.finish()  # empty after a stop string
            break
    return Emitted(tuple(gained[: len(pieces)]), tuple(pieces), reason, tuple(starts))


def record(
    profile: Profile,
    scheduled: ScheduledSequence,
    picks: Picks,
    verification: Verification,
    output: ForwardOutput,
    acceptance: Acceptance | None,
    price: PositionPrice,
    audits: tuple[Audit, ...],
) -> None:
    """Record the confidences at the masks that were read, and which drafts and accepted tokens were right.

    `price` is the one that `verify` used. Call this before `advance`.
    """
    sequence = scheduled.sequence
    if sequence.request.decode.mode is not Mode.AR and scheduled.is_decode:
        drafts = sequence.drafts
        from_text = (len(drafts.tokens), verification.num_accepted_drafts) if drafts.text else (0, 0)
        profile.observe_text(*from_text, drafts.replaced)
    if acceptance is None or acceptance.metric is not Metric.PROBABILITY:
        return
    if scheduled.num_masks:
        _record_masks(profile, scheduled, picks, verification, output, price)
    ratios = verification.ratios
    if (confidences := sequence.drafts.probabilities) and not sequence.drafts.text and sequence.matcher is None:
        ends = sequence.drafts.tokens[-1] in sequence.stop_ids  # a stop token is the last draft
        profile.observe_drafts(confidences, ratios, after=len(sequence.accepted_confidences), ends=ends)
        greedy = not sequence.request.sampling.temperature  # two draws may differ although the choices agree
        if acceptance.lossless and not acceptance.lenient and not sequence.accepted_confidences and greedy:
            profile.observe_audit(0.0, confidences, [ratio == 1 for ratio in ratios])
    if acceptance.lenient and ratios and sequence.matcher is None and not sequence.request.sampling.temperature:
        profile.observe_audit(0.0, ratios, [ratio == 1 for ratio in ratios])
    if audits:
        agreed = [audit.token == token for audit, token in zip(audits, sequence.tokens[-len(audits) :], strict=True)]
        profile.observe_audit(acceptance.threshold, sequence.accepted_confidences, agreed)


def judged_prediction(
    sequence: Sequence, verification: Verification, audits: tuple[Audit, ...], metric: Metric
) -> tuple[float, bool] | None:
    """Return the probability that the token that the last step predicted, or accepted, at its first mask is right, and
    whether it is; None if it was not verified. Call this before `advance`.

    Confidences are those of temperature 1. With draws, two tokens of one distribution agree at least as often as both
    are the most likely token. At higher temperatures they agree even less often, so nothing is judged.
    """
    temperature = sequence.request.sampling.temperature
    if temperature <= 1 and sequence.prediction and verification.verified:
        token, confidence = sequence.prediction
        kept = 0 in verification.kept
        if kept and token != verification.verified[0]:
            return None  # a draft from text was kept, and the model's own choice is not known
        right = token == verification.verified[0] and not kept
        return (confidence**2 if temperature else confidence), right
    if audits:
        probability = least_probability(sequence.accepted_confidences[0], metric)
        return probability, audits[0].token == sequence.tokens[-len(audits)]
    return None


def _record_masks(
    profile: Profile,
    scheduled: ScheduledSequence,
    picks: Picks,
    verification: Verification,
    output: ForwardOutput,
    price: PositionPrice,
) -> None:
    """Record in the profile the confidences at masks, up to a stop token that would end the sequence."""
    row = picks.masks[verification.num_accepted_drafts]
    ended = verification.verified[-1] in scheduled.sequence.stop_ids  # no mask is needed after the end
    if not scheduled.sequence.drafts.text:
        surprised = verification.num_accepted_drafts < scheduled.num_drafts
        profile.observe_rows(scheduled.masks, read=bool(row) or ended, surprised=surprised)
    if not row:
        return  # no masks follow the last correct draft
    confidences = output.confidences[row.start : row.stop]
    tokens = [output.tokens[picks.verifying[verification.num_accepted_drafts]], *output.tokens[row.start : row.stop]]
    # The first token is autoregressive, so the index of a stop token is the number of masks up to it.
    stop = next((index for index, token in enumerate(tokens) if token in scheduled.sequence.stop_ids), None)
    profile.observe_masks(len(row), confidences[:stop], price, ends=stop is not None)


def audits_of(sequence: Sequence, picks: Picks, output: ForwardOutput) -> tuple[Audit, ...]:
    """Return the model's own choices for the tokens accepted at masks in the last forward, if their logits are read.

    Draws are not audited, nor choices that depend on more than the logits, such as on penalties. Call this before
    `advance`.
    """
    ahead = len(sequence.accepted_confidences)
    sampling = sequence.request.sampling
    start = sequence.num_output_tokens - ahead
    if sampling.temperature or sampling.logit_bias or has_penalties(sampling) or start < sampling.min_tokens:
        return ()
    if len(picks.before) < ahead:
        return ()
    audited = picks.before[len(picks.before) - ahead :]
    return tuple(
        Audit(index, output.tokens[pick], output.confidences[pick]) for index, pick in enumerate(audited, start)
    )
