"""Propose a token at every position of a step whose logits are read; `verify` decides which tokens to take.

With penalties or a grammar, a choice depends on the choices before it in the same step. These proposals are made
lazily, one after another.
"""

import math
from collections import abc
from functools import partial
from itertools import islice, repeat

import torch
from torch import Tensor

from mars_ray.engine.chunk import TokenLogprobs
from mars_ray.engine.execution.model_runner import ForwardOutput, Picks
from mars_ray.engine.grammar.matcher import Matcher
from mars_ray.engine.request import SamplingParams
from mars_ray.engine.sampling.commit import Emitted
from mars_ray.engine.sampling.sampler import (
    SamplingPosition,
    draft_ratio,
    has_penalties,
    is_greedy,
    positions_of,
    process_logits,
    sample,
    sample_allowed,
)
from mars_ray.engine.sampling.verify import PlainProposal, Proposal, Proposals
from mars_ray.engine.scheduling.scheduler import ScheduledSequence
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.method.metric import Metric

NOTHING = Proposals(iter(()), lambda _right: ())
"""Empty proposals, for a part of a prompt that needs no logits."""


@torch.inference_mode()
def propose_all(batch: list[ScheduledSequence], picks: list[Picks], output: ForwardOutput) -> list[Proposals]:
    """Return the proposals of every sequence."""
    proposed: list[Proposals] = []
    together: list[int] = []
    for index, (scheduled, read) in enumerate(zip(batch, picks, strict=True)):
        if not scheduled.has_logits:
            proposed.append(NOTHING)
        elif is_greedy(scheduled.sequence):
            proposed.append(_likeliest(read, output))
        elif has_penalties(scheduled.sequence.request.sampling):
            proposed.append(_propose_one_by_one(scheduled.sequence, read, output))
        else:
            proposed.append(NOTHING)
            together.append(index)
    if together:
        sampled = _propose_together([(batch[index].sequence, picks[index]) for index in together], output)
        for index, proposals in zip(together, sampled, strict=True):
            proposed[index] = proposals
    for index, scheduled in enumerate(batch):
        if scheduled.has_logits and (matcher := scheduled.sequence.matcher) is not None:
            proposed[index] = _within_grammar(scheduled.sequence, matcher, proposed[index], picks[index], output)
    return proposed


def _likeliest(read: Picks, output: ForwardOutput) -> Proposals:
    """Propose the most likely token at every position."""

    def at(picks: range) -> abc.Iterator[PlainProposal]:
        part = slice(picks.start, picks.stop)
        return zip(output.tokens[part], output.confidences[part], repeat(True))

    def ratio(index: int, draft: int) -> float:
        # The forward has found the best token. A search in torch would wake its threads, which then spin for
        # milliseconds on the cores of the next forward.
        pick = read.verifying[index]
        logits_V = output.logits_MV[pick]
        return math.exp(float(logits_V[draft] - logits_V[output.tokens[pick]]))

    return Proposals(at(read.verifying), lambda right: at(read.masks[right]), ratio)


def _ratio(logits_MV: Tensor, rows: range, sampling: SamplingParams, index: int, draft: int) -> float:
    """Return the ratio of a draft (see `Proposals`). The logits in `rows[index]` judge the draft at `index`."""
    return draft_ratio(logits_MV[rows[index]], sampling, draft)


def _propose_together(batch: list[tuple[Sequence, Picks]], output: ForwardOutput) -> list[Proposals]:
    """Choose tokens at all positions of several sequences with one call of the sampler."""
    picks = [pick for _, read in batch for part in (read.verifying, *read.masks) for pick in part]
    logits_MV = output.logits_MV[picks]
    positions: list[SamplingPosition] = []
    starts: list[int] = []
    start = 0
    for sequence, read in batch:
        starts.append(start)
        for ahead, part in enumerate((read.verifying, *read.masks)):
            if part:
                process_logits(logits_MV[start : start + len(part)], sequence, ahead)
                positions += positions_of(sequence, len(part), ahead)
                start += len(part)
    chosen = dict(zip(picks, sample(logits_MV, [output.tokens[pick] for pick in picks], positions), strict=True))
    return [
        Proposals(
            (chosen[pick] for pick in read.verifying),
            lambda right, read=read: (chosen[pick] for pick in read.masks[right]),  # type: ignore[misc]
            partial(_ratio, logits_MV, range(start, start + len(read.verifying)), sequence.request.sampling),
        )
        for (sequence, read), start in zip(batch, starts, strict=True)
    ]


def _propose_one_by_one(sequence: Sequence, read: Picks, output: ForwardOutput) -> Proposals:
    """Choose tokens one position at a time. Each choice is made only after the token before it was taken."""
    taken = [] if sequence.matcher is None else sequence.matcher.ahead

    def at(picks: range, ahead: int) -> abc.Iterator[Proposal]:
        for position, pick in zip(positions_of(sequence, len(picks), ahead), picks, strict=True):
            with torch.inference_mode():
                logits_1V = output.logits_MV[pick : pick + 1].clone()
                process_logits(logits_1V, sequence, len(taken), taken)
                proposal = sample(logits_1V, output.tokens[pick : pick + 1], [position])[0]
            if sequence.matcher is None:
                taken.append(proposal.token)
            yield proposal

    return Proposals(at(read.verifying, 0), lambda right: at(read.masks[right], right + 1))


def _within_grammar(
    sequence: Sequence, matcher: Matcher, proposals: Proposals, read: Picks, output: ForwardOutput
) -> Proposals:
    """Replace each proposal with the token that the grammar forces, or with an allowed token if it is forbidden."""
    certain = 0.0 if sequence.request.decode.confidence_metric is Metric.ENTROPY else 1.0

    def allowed(plain: abc.Iterable[PlainProposal], picks: range) -> abc.Iterator[PlainProposal]:
        for proposal, pick in zip(plain, picks, strict=True):
            if matcher.ended:
                return
            best = output.tokens[pick]
            if (forced := matcher.forced()) is not None:
                proposal = Proposal(forced, certain, forced == best)
                matcher.take(forced)
            elif not matcher.take(proposal[0]):
                with torch.inference_mode():
                    logits_1V = output.logits_MV[pick : pick + 1].clone()
                    proposal = sample_allowed(logits_1V, best, sequence, matcher.ahead, matcher.allowed())
                matcher.take(proposal.token)
            yield proposal

    matcher.seek([])
    # The grammar follows the proposals, so no draft may take the place of one.
    return Proposals(
        allowed(proposals.verifying, read.verifying),
        lambda right: allowed(proposals.at_masks(right), read.masks[right]),
    )


@torch.inference_mode()
def prompt_logprobs_of(scheduled: ScheduledSequence, picks: Picks, output: ForwardOutput) -> list[TokenLogprobs]:
    """Return the log-probabilities of the prompt's tokens that the first picks of a sequence predict.

    Call this before `advance`.
    """
    sequence = scheduled.sequence
    count = sequence.request.sampling.prompt_logprobs or 0
    first = sequence.num_computed_tokens + 1
    tokens = sequence.request.prompt[first : first + scheduled.num_scored]
    entries = _token_logprobs(tokens, picks.before, count, output)
    return [TokenLogprobs(chosen, top, forward=0) for chosen, top in entries]


@torch.inference_mode()
def logprobs_of(
    emitted: Emitted, picks: abc.Iterable[int], count: int, output: ForwardOutput, forward: int
) -> tuple[TokenLogprobs, ...]:
    """Return the log-probability of each emitted token and of the `count` most likely tokens at its position.

    The k-th token was chosen at the k-th of `picks`, in the forward numbered `forward`.
    """
    entries = _token_logprobs(emitted.tokens, picks, count, output)
    return tuple(
        TokenLogprobs(chosen, top, start, forward) for (chosen, top), start in zip(entries, emitted.starts, strict=True)
    )


def _token_logprobs(
    tokens: abc.Sequence[int], picks: abc.Iterable[int], count: int, output: ForwardOutput
) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """Return the log-probability of each token at its pick, and the `count` most likely tokens there with theirs."""
    log_p_TV = output.logits_MV[list(islice(picks, len(tokens)))].log_softmax(dim=-1)
    chosen_T = log_p_TV.gather(1, torch.tensor(tokens, device=log_p_TV.device)[:, None]).squeeze(1)
    best, ids = log_p_TV.topk(count, dim=-1)
    top = [tuple(zip(*pair, strict=True)) for pair in zip(ids.tolist(), best.tolist(), strict=True)]
    return list(zip(chosen_T.tolist(), top, strict=True))
