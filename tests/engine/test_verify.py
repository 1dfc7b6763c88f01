"""Verification against loops and against accepted lengths of tensors."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.engine.request import LOSSLESS, Acceptance
from mars_ray.engine.sampling.verify import Proposal, Proposals, Verification, verify
from mars_ray.engine.scheduling.sequence import Drafts
from mars_ray.method.acceptance import accepted_lengths
from mars_ray.method.drafts import PositionPrice
from mars_ray.method.metric import Metric, accepts_nothing

TOKENS = st.integers(0, 5)
PROPOSALS = st.lists(st.builds(Proposal, TOKENS, st.floats(0, 1), st.integers(0, 9).map(bool)), min_size=1, max_size=9)
THRESHOLDS = st.floats(0.001, 0.999)
PRICES = st.builds(PositionPrice, st.floats(0.01, 0.5), st.integers(0, 9))
DEAR = PositionPrice(1.0)
"""A price that no draft pays."""
NO_STOP: frozenset[int] = frozenset()


def asked(proposals: list[Proposal], log: list[Proposal]) -> Iterator[Proposal]:
    """Give proposals one by one and note which were asked for."""
    for proposal in proposals:
        log.append(proposal)
        yield proposal


def ends_at(tokens: list[int], stop_ids: frozenset[int], max_tokens: int) -> int:
    """Return how many of `tokens` stand up to and with the first stop token, at most `max_tokens`."""
    stop = next((place + 1 for place, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return min(stop, max_tokens)


def verified_by_hand(
    proposals: list[Proposal],
    drafts: list[int],
    ratios: list[float],
    needs: Acceptance,
    price: PositionPrice,
    stop_ids: frozenset[int],
    max_tokens: int,
) -> tuple[Verification, int]:
    """Return the outcome, and how many proposals have to be seen for it. `ratios` are those of wrong drafts."""
    same = [each.token == draft for each, draft in zip(proposals, drafts, strict=False)]
    judged = [1.0 if equal else needs.lenient * ratio for equal, ratio in zip(same, ratios, strict=True)]
    kept = [
        equal or (needs.lenient and needs.threshold < 1 and ratio >= needs.threshold and ratio > 0)
        for equal, ratio in zip(same, ratios, strict=True)
    ]
    right = kept.index(False) if False in kept else len(drafts)
    tokens = [*drafts[:right], proposals[right].token]
    verified = tokens[: ends_at(tokens, stop_ids, max_tokens)]
    result = Verification(verified, num_accepted_drafts=min(right, len(verified)), ratios=judged[: len(verified)])
    result.kept = [index for index in range(result.num_accepted_drafts) if not same[index]]
    over = verified[-1] in stop_ids or len(verified) == max_tokens or right < len(drafts)
    if over or not proposals[len(drafts)].is_argmax:
        return result, len(verified)
    masks = proposals[len(drafts) + 1 :]
    seen = 0
    for mask in masks:
        seen += 1
        sure = (
            mask.confidence <= needs.threshold if needs.metric is Metric.ENTROPY else mask.confidence >= needs.threshold
        )
        if sure and not result.drafts.tokens and needs != LOSSLESS and not needs.lenient:
            result.accepted.append(mask.token)
            result.accepted_confidences.append(mask.confidence)
        else:
            first = len(result.accepted)
            likely = [
                math.exp(-each.confidence) if needs.metric is Metric.ENTROPY else each.confidence for each in masks
            ]
            if seen == 1 and (needs == LOSSLESS or needs.lenient):
                result.prediction = mask.token, likely[0]
            if math.prod(likely[first:seen]) < price.of_draft(seen - 1 - first):
                break
            result.drafts.tokens.append(mask.token)
            result.drafts.probabilities.append(likely[seen - 1])
        if mask.token in stop_ids or len(verified) + seen == max_tokens or not mask.is_argmax:
            break
    return result, len(verified) + seen


ACCEPTANCES = st.one_of(
    st.just(LOSSLESS),
    st.builds(Acceptance, THRESHOLDS, st.sampled_from(Metric)),
    st.builds(Acceptance, st.floats(0, 1), st.just(Metric.PROBABILITY), st.just(True)),
)


@given(PROPOSALS, st.data(), ACCEPTANCES, PRICES, st.frozensets(TOKENS, max_size=2), st.integers(1, 10))
@settings(max_examples=300)
def test_the_outcome_is_that_of_the_slow_rules_and_looks_no_further_than_they_do(
    proposals: list[Proposal],
    data: st.DataObject,
    needs: Acceptance,
    price: PositionPrice,
    stop_ids: frozenset[int],
    max_tokens: int,
) -> None:
    count = data.draw(st.integers(0, len(proposals) - 1))
    drafts = [data.draw(st.sampled_from([each.token, 0])) for each in proposals[:count]]
    ratios = [data.draw(st.floats(0, 1)) for _ in drafts]
    log: list[Proposal] = []
    asked_for = replace(behind_the_last(asked(proposals, log), drafts), ratio=lambda index, draft: ratios[index])
    done = verify(asked_for, drafts, needs, price, stop_ids, max_tokens)
    assert (done, len(log)) == verified_by_hand(proposals, drafts, ratios, needs, price, stop_ids, max_tokens)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=9), THRESHOLDS, st.sampled_from(Metric))
def test_without_drafts_and_ends_the_tokens_are_as_many_as_the_accepted_length(
    confidences: list[float], threshold: float, metric: Metric
) -> None:
    assert not accepts_nothing(threshold, metric)
    proposals = [Proposal(number, value, True) for number, value in enumerate(confidences)]
    done = verify(behind_the_last(proposals, []), [], Acceptance(threshold, metric), DEAR, NO_STOP, max_tokens=99)
    (accepted,) = accepted_lengths(
        torch.tensor([confidences], dtype=torch.float64), torch.tensor([threshold], dtype=torch.float64), metric
    ).tolist()
    assert done.verified + done.accepted == list(range(accepted))


def behind_the_last(proposals: Iterable[Proposal], drafts: list[int]) -> Proposals:
    """Masks behind the last draft alone."""
    coming = iter(proposals)
    return Proposals(islice(coming, len(drafts) + 1), lambda right: coming if right == len(drafts) else ())


SURE = Acceptance(0.9, Metric.PROBABILITY)


def certain(*tokens: int) -> list[Proposal]:
    return [Proposal(token, 1.0, True) for token in tokens]


def test_one_proposal_is_one_token_however_unsure() -> None:
    done = verify(behind_the_last([Proposal(7, 0.0, False)], []), [], SURE, DEAR, NO_STOP, max_tokens=9)
    assert done == Verification([7])


def test_a_stop_token_at_a_mask_is_taken_and_nothing_behind_it() -> None:
    done = verify(behind_the_last(certain(1, 2, 3, 4), []), [], SURE, DEAR, frozenset({3}), max_tokens=9)
    assert done.verified + done.accepted == [1, 2, 3]


def test_no_more_tokens_are_taken_than_asked_for() -> None:
    done = verify(behind_the_last(certain(1, 2, 3, 4), []), [], SURE, DEAR, NO_STOP, max_tokens=2)
    assert done.verified + done.accepted == [1, 2]


def test_a_token_that_is_not_the_models_first_choice_is_taken_and_is_the_last() -> None:
    proposals = [Proposal(1, 1.0, True), Proposal(2, 1.0, False), Proposal(3, 1.0, True)]
    done = verify(behind_the_last(proposals, []), [], SURE, DEAR, NO_STOP, max_tokens=9)
    assert done.verified + done.accepted == [1, 2]


def test_the_first_wrong_draft_is_replaced_and_what_stood_behind_it_is_dropped() -> None:
    done = verify(behind_the_last(certain(1, 2, 3, 4, 5), [1, 9, 3]), [1, 9, 3], SURE, DEAR, NO_STOP, max_tokens=9)
    assert done == Verification([1, 2], num_accepted_drafts=1, ratios=[1.0, 0.0])


LENIENT = Acceptance(0.1, Metric.PROBABILITY, lenient=True)


def test_lenience_keeps_a_draft_that_is_likely_enough_and_goes_on_after_it() -> None:
    proposals = replace(behind_the_last(certain(1, 2, 3), [1, 9]), ratio=lambda index, draft: 0.1)
    done = verify(proposals, [1, 9], LENIENT, DEAR, NO_STOP, max_tokens=9)
    assert done == Verification([1, 9, 3], num_accepted_drafts=2, ratios=[1.0, 0.1], kept=[1])


def test_lenience_accepts_no_token_before_it_is_verified() -> None:
    cheap = PositionPrice(0.01)
    done = verify(behind_the_last(certain(1, 2), []), [], LENIENT, cheap, NO_STOP, max_tokens=9)
    assert (done.accepted, done.drafts.tokens) == ([], [2])


def test_at_threshold_1_lenience_does_not_keep_a_tie() -> None:
    proposals = replace(behind_the_last(certain(1, 2), [9]), ratio=lambda index, draft: 1.0)
    done = verify(proposals, [9], replace(LENIENT, threshold=1.0), DEAR, NO_STOP, max_tokens=9)
    assert done.verified == [1]


def test_when_all_drafts_are_right_the_step_goes_on_at_the_masks() -> None:
    proposals = [*certain(1, 2, 3), Proposal(4, 0.95, True), Proposal(5, 0.97, True), Proposal(6, 0.5, True)]
    done = verify(behind_the_last(proposals, [1, 2]), [1, 2], SURE, DEAR, NO_STOP, max_tokens=9)
    verified = Verification([1, 2, 3], num_accepted_drafts=2, ratios=[1.0, 1.0])
    assert done == replace(verified, accepted=[4, 5], accepted_confidences=[0.95, 0.97])


def test_behind_a_wrong_draft_the_step_goes_on_at_the_masks_behind_the_right_ones() -> None:
    proposals = Proposals(iter(certain(1, 2, 3)), lambda right: certain(10 * right, 10 * right + 1))
    done = verify(proposals, [1, 9], SURE, DEAR, NO_STOP, max_tokens=9)
    verified = Verification([1, 2], num_accepted_drafts=1, ratios=[1.0, 0.0])
    assert done == replace(verified, accepted=[10, 11], accepted_confidences=[1.0, 1.0])


def test_tokens_that_are_verified_are_drafted_while_all_are_likely_enough_to_be_right() -> None:
    proposals = [*certain(1), Proposal(2, 0.6, True), Proposal(3, 0.6, True), Proposal(4, 0.9, True)]
    drafted = [
        verify(behind_the_last(proposals, []), [], LOSSLESS, price, NO_STOP, max_tokens=9).drafts.tokens
        for price in (*map(PositionPrice, (0.05, 0.165, 0.25, 0.305)), PositionPrice(0.305, cheap=2))
    ]
    assert drafted == [[2, 3, 4], [2, 3], [2], [], [2]]


def test_from_the_first_token_that_falls_short_on_all_are_drafts_however_sure() -> None:
    proposals = [*certain(1), Proposal(2, 0.95, True), Proposal(3, 0.8, True), Proposal(4, 0.99, True)]
    done = verify(behind_the_last(proposals, []), [], SURE, PositionPrice(0.05), NO_STOP, max_tokens=9)
    assert done == Verification([1], accepted=[2], accepted_confidences=[0.95], drafts=Drafts([3, 4], [0.8, 0.99]))
