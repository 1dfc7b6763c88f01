"""The walk against loops and against accepted lengths of whole tensors."""

from collections.abc import Iterator

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.engine.sampling.verify import Proposal, Walk, walk
from mars_ray.method.acceptance import accepted_lengths
from mars_ray.method.metric import Metric, drafts_nothing

TOKENS = st.integers(0, 5)
PROPOSALS = st.lists(st.builds(Proposal, TOKENS, st.floats(0, 1), st.integers(0, 9).map(bool)), min_size=1, max_size=9)
THRESHOLDS = st.floats(0.001, 0.999)
NO_STOP: frozenset[int] = frozenset()


def asked(proposals: list[Proposal], log: list[Proposal]) -> Iterator[Proposal]:
    """Give proposals one by one and note which were asked for."""
    for proposal in proposals:
        log.append(proposal)
        yield proposal


def ends_at(tokens: list[int], stop_ids: frozenset[int], room: int) -> int:
    """Return how many of `tokens` stand up to and with the first stop token, at most `room`."""
    stop = next((place + 1 for place, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return min(stop, room)


def walked_by_hand(
    proposals: list[Proposal],
    drafts: list[int],
    threshold: float,
    metric: Metric,
    stop_ids: frozenset[int],
    room: int,
) -> tuple[Walk, int]:
    """Return the walk, and how many proposals it needs to see."""
    tokens = [each.token for each in proposals]
    right = 0
    while right < len(drafts) and tokens[right] == drafts[right]:
        right += 1
    kept = tokens[: ends_at(tokens[: right + 1], stop_ids, room)]
    result = Walk(kept, agreed=min(right, len(kept)))
    over = kept[-1] in stop_ids or len(kept) == room or right < len(drafts)
    if over or not proposals[len(drafts)].foreseen:
        return result, len(kept)
    masks = proposals[len(drafts) + 1 :]
    seen = 0
    for mask in masks:
        seen += 1
        if (mask.confidence > threshold) if metric is Metric.ENTROPY else (mask.confidence < threshold):
            break
        result.drafted.append(mask.token)
        so_far = [each.confidence for each in masks[:seen]]
        result.confidences.append(max(so_far) if metric is Metric.ENTROPY else min(so_far))
        if mask.token in stop_ids or len(kept) + seen == room or not mask.foreseen:
            break
    return result, len(kept) + seen


@given(PROPOSALS, st.data(), THRESHOLDS, st.sampled_from(Metric), st.frozensets(TOKENS, max_size=2), st.integers(1, 10))
@settings(max_examples=300)
def test_a_walk_is_that_of_the_slow_rules_and_looks_no_further_than_they_do(
    proposals: list[Proposal],
    data: st.DataObject,
    threshold: float,
    metric: Metric,
    stop_ids: frozenset[int],
    room: int,
) -> None:
    count = data.draw(st.integers(0, len(proposals) - 1))
    drafts = [data.draw(st.sampled_from([each.token, 0])) for each in proposals[:count]]
    log: list[Proposal] = []
    done = walk(asked(proposals, log), drafts, threshold, metric, stop_ids, room)
    assert (done, len(log)) == walked_by_hand(proposals, drafts, threshold, metric, stop_ids, room)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), THRESHOLDS, st.sampled_from(Metric))
def test_without_drafts_and_ends_the_tokens_are_as_many_as_the_accepted_length(
    confidences: list[float], threshold: float, metric: Metric
) -> None:
    assert not drafts_nothing(threshold, metric)
    proposals = [Proposal(number, value, True) for number, value in enumerate(confidences)]
    done = walk(proposals, [], threshold, metric, NO_STOP, room=99)
    (accepted,) = accepted_lengths(
        torch.tensor([confidences], dtype=torch.float64), torch.tensor([threshold], dtype=torch.float64), metric
    ).tolist()
    assert done.kept + done.drafted == list(range(accepted))


def certain(*tokens: int) -> list[Proposal]:
    return [Proposal(token, 1.0, True) for token in tokens]


def test_one_proposal_is_one_token_however_unsure() -> None:
    assert walk([Proposal(7, 0.0, False)], [], 0.9, Metric.PROBABILITY, NO_STOP, room=9) == Walk([7])


def test_a_stop_token_at_a_mask_is_kept_and_nothing_behind_it() -> None:
    done = walk(certain(1, 2, 3, 4), [], 0.9, Metric.PROBABILITY, frozenset({3}), room=9)
    assert done.kept + done.drafted == [1, 2, 3]


def test_no_more_tokens_are_kept_than_there_is_room_for() -> None:
    done = walk(certain(1, 2, 3, 4), [], 0.9, Metric.PROBABILITY, NO_STOP, room=2)
    assert done.kept + done.drafted == [1, 2]


def test_a_token_the_model_did_not_foresee_is_kept_and_ends_the_walk() -> None:
    proposals = [Proposal(1, 1.0, True), Proposal(2, 1.0, False), Proposal(3, 1.0, True)]
    done = walk(proposals, [], 0.9, Metric.PROBABILITY, NO_STOP, room=9)
    assert done.kept + done.drafted == [1, 2]


def test_the_first_wrong_draft_is_replaced_and_what_stood_behind_it_is_dropped() -> None:
    done = walk(certain(1, 2, 3, 4, 5), [1, 9, 3], 0.9, Metric.PROBABILITY, NO_STOP, room=9)
    assert done == Walk([1, 2], agreed=1)


def test_when_all_drafts_are_right_the_walk_goes_on_at_the_masks() -> None:
    proposals = [*certain(1, 2, 3), Proposal(4, 0.95, True), Proposal(5, 0.97, True), Proposal(6, 0.5, True)]
    done = walk(proposals, [1, 2], 0.9, Metric.PROBABILITY, NO_STOP, room=9)
    assert done == Walk([1, 2, 3], drafted=[4, 5], confidences=[0.95, 0.95], agreed=2)
