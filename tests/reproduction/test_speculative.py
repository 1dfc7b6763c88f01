"""Speculative decoding against the reference decoder, and against a slow twin that reads everything anew each time."""

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from mars_ray.errors import ConfigError
from mars_ray.method.acceptance import confidence
from mars_ray.method.metric import Metric
from mars_ray.method.reference import DecodeOptions, decode, last_logits
from mars_ray.model.checkpoint import Checkpoint
from pipelines.reproduction.baselines.output import BaselineOutput
from pipelines.reproduction.baselines.speculative import MaskGroups, MaskWindow, decode_speculative
from tests.factories.token_rows import MASK_ID

prompt = st.lists(st.integers(0, MASK_ID - 1), min_size=1, max_size=9)
stops = st.frozensets(st.integers(0, MASK_ID - 1), max_size=6)
windows = st.builds(MaskWindow, block=st.integers(1, 5), threshold=st.sampled_from([0.0, 0.1, 0.3, 1.0]))
drafts = pytest.mark.parametrize("draft", ["exact_network", "similar_network", "other_network"])


def window_of(network: PreTrainedModel, prefix: list[int], window: MaskWindow, room: int) -> list[int]:
    """What threshold decoding takes behind `prefix`, at most `room` tokens."""
    count = min(window.block, room)
    logits_WV = last_logits(network, [*prefix, *[MASK_ID] * (count - 1)], count, MASK_ID)
    certain = confidence(logits_WV, Metric.PROBABILITY).tolist()
    tokens = logits_WV.argmax(dim=-1).tolist()
    kept = 1
    while window.threshold < 1 and kept < len(tokens) and certain[kept] >= window.threshold:
        kept += 1
    return tokens[:kept]


@torch.no_grad()
def slow_twin(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    prompt: list[int],
    answer: BaselineOutput,
    draft_length: int,
    draft_window: MaskWindow,
    target_window: MaskWindow,
) -> BaselineOutput:
    while not answer.is_finished:
        prefix = [*prompt, *answer.tokens]
        length = min(draft_length, answer.left - 1)
        guesses: list[int] = []
        while len(guesses) < length and not answer.stop_ids.intersection(guesses):
            guesses += window_of(draft, prefix + guesses, draft_window, length - len(guesses))
            answer.draft_forwards += 1
        right: list[int] = []
        for guess in guesses:
            if [guess] != window_of(target, prefix + right, MaskWindow(), 1):
                break
            right.append(guess)
        answer.forwards += 1
        answer.extend(right + window_of(target, prefix + right, target_window, answer.left))
    return answer


@drafts
@given(
    prompts=st.lists(prompt, max_size=3),
    draft_length=st.integers(1, 6),
    max_tokens=st.integers(1, 20),
    stop_ids=stops,
    draft_window=windows,
    block=st.integers(1, 5),
)
def test_a_target_that_trusts_no_mask_gives_the_tokens_of_autoregressive_decoding(
    exact_network: PreTrainedModel,
    request: pytest.FixtureRequest,
    draft: str,
    prompts: list[list[int]],
    draft_length: int,
    max_tokens: int,
    stop_ids: frozenset[int],
    draft_window: MaskWindow,
    block: int,
) -> None:
    answers = decode_speculative(
        exact_network,
        request.getfixturevalue(draft),
        prompts,
        draft_length=draft_length,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        mask_id=MASK_ID,
        draft_window=draft_window,
        target_window=MaskWindow(block=block, threshold=1.0),
    )
    options = DecodeOptions(mode="ar", max_tokens=max_tokens, stop_ids=stop_ids)
    expected = decode(exact_network, prompts, options, mask_id=MASK_ID)
    assert [(a.tokens, a.finish_reason) for a in answers] == [(e.tokens, e.finish_reason) for e in expected]


@drafts
@given(
    alone=prompt,
    draft_length=st.integers(1, 6),
    max_tokens=st.integers(1, 20),
    stop_ids=stops,
    draft_window=windows,
    target_window=windows,
)
def test_tokens_and_forwards_are_those_of_the_slow_twin(
    exact_network: PreTrainedModel,
    request: pytest.FixtureRequest,
    draft: str,
    alone: list[int],
    draft_length: int,
    max_tokens: int,
    stop_ids: frozenset[int],
    draft_window: MaskWindow,
    target_window: MaskWindow,
) -> None:
    """So behind verified drafts stands only what threshold decoding gives there, and masks never stay in a cache."""
    draft_network = request.getfixturevalue(draft)
    (answer,) = decode_speculative(
        exact_network,
        draft_network,
        [alone],
        draft_length=draft_length,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        mask_id=MASK_ID,
        draft_window=draft_window,
        target_window=target_window,
    )
    empty = BaselineOutput(max_tokens, stop_ids)
    assert answer == slow_twin(exact_network, draft_network, alone, empty, draft_length, draft_window, target_window)


def test_a_draft_that_is_always_right_gives_its_length_and_one_token_a_forward(exact_network: PreTrainedModel) -> None:
    (answer,) = decode_speculative(
        exact_network,
        exact_network,
        [[1, 2, 3]],
        draft_length=3,
        max_tokens=16,
        stop_ids=frozenset(),
        mask_id=MASK_ID,
    )
    assert (len(answer.tokens), answer.forwards, answer.draft_forwards) == (16, 4, 12)


def test_a_mask_that_is_always_trusted_fills_the_draft_and_goes_on_behind_it(exact_network: PreTrainedModel) -> None:
    all_masks = MaskWindow(block=4, threshold=0.0)
    (answer,) = decode_speculative(
        exact_network,
        exact_network,
        [[1, 2, 3]],
        draft_length=4,
        max_tokens=40,
        stop_ids=frozenset(),
        mask_id=MASK_ID,
        draft_window=all_masks,
        target_window=all_masks,
    )
    assert answer.draft_forwards <= answer.forwards <= 10


@given(prefix=st.integers(1, 6), outcomes=st.integers(1, 4), masks=st.integers(1, 3), data=st.data())
def test_a_group_sees_the_prefix_its_drafts_and_itself(
    prefix: int, outcomes: int, masks: int, data: st.DataObject
) -> None:
    cached = data.draw(st.integers(0, prefix - 1))
    tokens = prefix + outcomes - 1
    slots: list[tuple[int | None, int]] = [(None, position) for position in range(tokens)]
    slots += [(group, prefix + group + mask) for group in range(outcomes) for mask in range(masks)]
    groups = MaskGroups(prefix=prefix, outcomes=outcomes, masks=masks)
    visible = groups.visible(cached)
    assert groups.positions() == [position for _, position in slots]
    for q, k in product(range(cached, len(slots)), range(len(slots))):
        (query_group, query_position), (key_group, key_position) = slots[q], slots[k]
        if key_group is not None:
            expected = key_group == query_group and key_position <= query_position
        elif query_group is None:
            expected = key_position <= query_position
        else:
            expected = key_position < prefix + query_group
        assert bool(visible[q - cached, k]) == expected


def test_the_bundled_model_drafts_with_its_masks_what_it_would_say(
    bundled: Checkpoint, bundled_prompts: list[list[int]]
) -> None:
    how: dict[str, Any] = {"max_tokens": 32, "stop_ids": bundled.stop_ids}
    expected = decode(bundled.network, bundled_prompts, DecodeOptions(mode="ar", **how), mask_id=bundled.mask_id)
    network, trusting = bundled.network, MaskWindow(block=4, threshold=0.95)
    chosen: list[dict[str, Any]] = [
        {},
        {"draft_window": trusting},
        {"draft_window": trusting, "target_window": trusting},
    ]
    plain, drafting, both = (
        decode_speculative(network, network, bundled_prompts, draft_length=4, mask_id=bundled.mask_id, **how, **windows)
        for windows in chosen
    )
    for answers in (plain, drafting):
        assert [answer.tokens for answer in answers] == [each.tokens for each in expected]
    assert sum(a.draft_forwards for a in drafting) < 0.7 * sum(a.draft_forwards for a in plain)
    assert sum(a.forwards for a in drafting) == sum(a.forwards for a in plain)
    assert sum(a.forwards for a in both) < 0.8 * sum(a.forwards for a in plain)


def test_values_out_of_range_are_refused(exact_network: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="draft_length is 0"):
        decode_speculative(
            exact_network, exact_network, [], draft_length=0, max_tokens=4, stop_ids=frozenset(), mask_id=MASK_ID
        )
    with pytest.raises(ConfigError, match="block is 0"):
        MaskWindow(block=0)
    with pytest.raises(ConfigError, match=r"threshold is 1\.5"):
        MaskWindow(threshold=1.5)
