"""The logits of a forward -> what each sequence is offered, position by position.

In:    feeds, where in the window the logits of each are.
Out:   for each feed its proposals in order, lazily where a choice depends on the one before.
Never: accepts anything; the walk does.
"""

from collections.abc import Iterable, Iterator
from itertools import repeat

import torch

from mars_ray.engine.chunk import TokenLogprobs
from mars_ray.engine.execution.model_runner import Window
from mars_ray.engine.grammar.matcher import Matcher
from mars_ray.engine.sampling.commit import Emitted
from mars_ray.engine.sampling.sampler import choose_allowed, constrain, is_plain, is_sequential, positions_of, propose
from mars_ray.engine.sampling.verify import Proposal
from mars_ray.engine.scheduling.scheduler import Feed
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.method.metric import Metric

Proposals = Iterable[Proposal | tuple[int, float, bool]]


@torch.inference_mode()
def propose_all(feeds: list[Feed], picks: list[slice], window: Window) -> list[Proposals]:
    """Return the proposals of every feed; `picks` are the positions behind its last token, drafts and masks."""
    proposed: list[Proposals] = []
    together: list[int] = []
    for number, (feed, where) in enumerate(zip(feeds, picks, strict=True)):
        if not feed.complete:
            proposed.append(())
        elif is_plain(feed.sequence):
            proposed.append(zip(window.tokens[where], window.confidences[where], repeat(True)))
        elif is_sequential(feed.sequence.request.sampling):
            proposed.append(_one_by_one(feed.sequence, where, window))
        else:
            proposed.append(())
            together.append(number)
    if together:
        _propose_together([(feeds[number].sequence, picks[number]) for number in together], together, window, proposed)
    for number, feed in enumerate(feeds):
        if feed.complete and (matcher := feed.sequence.matcher) is not None:
            proposed[number] = _within_grammar(feed.sequence, matcher, proposed[number], picks[number], window)
    return proposed


def _propose_together(
    wanted: list[tuple[Sequence, slice]], numbers: list[int], window: Window, proposed: list[Proposals]
) -> None:
    """Choose at all positions of several sequences in one go."""
    picks = [pick for _, where in wanted for pick in range(where.start, where.stop)]
    logits_MV = window.logits_MV[picks]
    positions = []
    start = 0
    for sequence, where in wanted:
        count = where.stop - where.start
        constrain(logits_MV[start : start + count], sequence, ahead=0)
        positions += positions_of(sequence, count)
        start += count
    coming = iter(propose(logits_MV, [window.tokens[pick] for pick in picks], positions))
    for number, (_, where) in zip(numbers, wanted, strict=True):
        proposed[number] = [next(coming) for _ in range(where.start, where.stop)]


def _one_by_one(sequence: Sequence, where: slice, window: Window) -> Iterator[Proposal]:
    """Choose at one position after the other: the walk asks for the next only if it kept the one before."""
    accepted = [] if sequence.matcher is None else sequence.matcher.ahead
    for position, pick in zip(
        positions_of(sequence, where.stop - where.start), range(where.start, where.stop), strict=True
    ):
        with torch.inference_mode():
            logits_1V = window.logits_MV[pick : pick + 1].clone()
            constrain(logits_1V, sequence, len(accepted), accepted)
            proposal = propose(logits_1V, window.tokens[pick : pick + 1], [position])[0]
        if sequence.matcher is None:
            accepted.append(proposal.token)
        yield proposal


def _within_grammar(
    sequence: Sequence, matcher: Matcher, proposals: Proposals, where: slice, window: Window
) -> Iterator[Proposal | tuple[int, float, bool]]:
    """Put in place of a proposal what the grammar forces, or where it forbids the proposal, a choice it allows."""
    certain = 0.0 if sequence.request.decode.metric is Metric.ENTROPY else 1.0
    matcher.seek([])
    for proposal, pick in zip(proposals, range(where.start, where.stop), strict=True):
        if matcher.ended:
            return
        best = window.tokens[pick]
        if (forced := matcher.forced()) is not None:
            proposal = Proposal(forced, certain, forced == best)
            matcher.take(forced)
        elif not matcher.take(proposal[0]):
            with torch.inference_mode():
                logits_1V = window.logits_MV[pick : pick + 1].clone()
                proposal = choose_allowed(logits_1V, best, sequence, matcher.ahead, matcher.allowed())
            matcher.take(proposal.token)
        yield proposal


@torch.inference_mode()
def logprobs_of(emitted: Emitted, first: int, count: int, window: Window) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities of its tokens, chosen at the picks from `first` on, and of the `count` best."""
    tokens = emitted.tokens
    log_p_TV = window.logits_MV[first : first + len(tokens)].log_softmax(dim=-1)
    chosen_T = log_p_TV.gather(1, torch.tensor(tokens, device=log_p_TV.device)[:, None]).squeeze(1)
    best, ids = log_p_TV.topk(count, dim=-1)
    return tuple(
        TokenLogprobs(chosen, tuple(zip(top_ids, top, strict=True)), start)
        for chosen, top_ids, top, start in zip(
            chosen_T.tolist(), ids.tolist(), best.tolist(), emitted.starts, strict=True
        )
    )
