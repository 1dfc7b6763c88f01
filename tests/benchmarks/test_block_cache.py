"""The paper's batch decoder against the reference, wherever the two must agree."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from benchmarks.decode.block_cache import decode_block_cache
from mars_ray.errors import ConfigError
from mars_ray.method.metric import Metric
from mars_ray.method.reference import DecodedSequence, DecodeOptions
from tests.factories.token_rows import MASK_ID

prompt = st.lists(st.integers(0, MASK_ID - 1), min_size=1, max_size=9)
stops = st.frozensets(st.integers(0, MASK_ID - 1), max_size=12)


@torch.no_grad()
def decode_as_the_paper(network: PreTrainedModel, prompt: list[int], options: DecodeOptions) -> DecodedSequence:
    """Decode one sequence. Predictions from the first that falls short on are thrown away, as in the paper."""
    done = DecodedSequence()
    autoregressive = options.mode == "ar" or options.threshold == (0 if options.metric is Metric.ENTROPY else 1)
    while True:
        done.forwards += 1
        masks = 0 if autoregressive else options.block - 1
        ids = prompt + done.tokens + [MASK_ID] * masks
        logits = network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1 - masks :]
        logits[:, MASK_ID] = -torch.inf
        for position, p in enumerate(logits.softmax(-1)):
            first, second = p.topk(2).values.tolist()
            entropy = -sum(x * x.log() for x in p if x > 0)
            value = {"probability": first, "margin": first - second, "entropy": float(entropy)}[options.metric]
            fails = value > options.threshold if options.metric is Metric.ENTROPY else value < options.threshold
            if position > 0 and fails:
                break
            done.tokens.append(int(p.argmax()))
            done.confidences.append(value)
            if done.tokens[-1] in options.stop_ids:
                done.finish_reason = "stop"
                return done
            if len(done.tokens) == options.max_tokens:
                return done


def same(decoded: DecodedSequence, expected: DecodedSequence) -> bool:
    assert decoded.confidences == pytest.approx(expected.confidences, abs=1e-4)
    return (decoded.tokens, decoded.forwards, decoded.finish_reason) == (
        expected.tokens,
        expected.forwards,
        expected.finish_reason,
    )


@given(
    batch=st.lists(prompt, min_size=1, max_size=4),
    asked=st.sampled_from([{"mode": "ar"}, {"threshold": 1.0}, {"threshold": 0.0, "metric": Metric.ENTROPY}]),
    max_tokens=st.integers(1, 14),
    stop_ids=stops,
    cache_block=st.integers(1, 16),
)
def test_one_token_at_a_time_it_decodes_as_the_reference_whatever_the_batch(
    network: PreTrainedModel,
    batch: list[list[int]],
    asked: dict,
    max_tokens: int,
    stop_ids: frozenset[int],
    cache_block: int,
) -> None:
    options = DecodeOptions(**asked, block=4, max_tokens=max_tokens, stop_ids=stop_ids)
    decoded = decode_block_cache(network, batch, options, mask_id=MASK_ID, cache_block=cache_block)
    expected = [decode_as_the_paper(network, tokens, options) for tokens in batch]
    assert all(same(one, other) for one, other in zip(decoded, expected, strict=True))


@given(
    alone=prompt,
    options=st.builds(
        DecodeOptions,
        threshold=st.sampled_from([0.0, 0.1, 0.3, 0.6]),
        metric=st.sampled_from(Metric),
        block=st.integers(1, 8),
        max_tokens=st.integers(1, 14),
        stop_ids=stops,
    ),
    spare=st.integers(0, 3),
)
def test_a_row_alone_in_a_block_that_holds_its_output_decodes_as_the_reference(
    network: PreTrainedModel, alone: list[int], options: DecodeOptions, spare: int
) -> None:
    (decoded,) = decode_block_cache(network, [alone], options, mask_id=MASK_ID, cache_block=options.max_tokens + spare)
    expected = decode_as_the_paper(network, alone, options)
    assert same(decoded, expected)


def test_the_window_is_cut_at_the_end_of_the_block(network: PreTrainedModel) -> None:
    options = DecodeOptions(threshold=0.0, block=4, max_tokens=12)
    for cache_block, forwards in ((4, 3), (3, 4), (6, 4), (12, 3)):
        (decoded,) = decode_block_cache(network, [[1, 2, 3]], options, mask_id=MASK_ID, cache_block=cache_block)
        assert (len(decoded.tokens), decoded.forwards) == (12, forwards)


@given(batch=st.lists(prompt, min_size=1, max_size=4), block=st.integers(1, 6), cache_block=st.integers(1, 16))
def test_the_mask_token_is_never_emitted(
    network: PreTrainedModel, batch: list[list[int]], block: int, cache_block: int
) -> None:
    embedding = network.get_output_embeddings()
    # The mask token would win everywhere: its logit is far above all others.
    hook = embedding.register_forward_hook(
        lambda _module, _args, logits: logits.index_fill(-1, torch.tensor([MASK_ID]), 1e3)
    )
    try:
        options = DecodeOptions(threshold=0.3, block=block, max_tokens=12)
        decoded = decode_block_cache(network, batch, options, mask_id=MASK_ID, cache_block=cache_block)
    finally:
        hook.remove()
    assert all(MASK_ID not in each.tokens and len(each.tokens) == 12 for each in decoded)


def test_a_stop_token_inside_a_window_ends_the_row_there_and_the_others_go_on(network: PreTrainedModel) -> None:
    batch = [[1, 2, 3], [9, 8, 7, 6, 5]]
    free = decode_block_cache(
        network, batch, DecodeOptions(threshold=0.0, block=8, max_tokens=16), mask_id=MASK_ID, cache_block=8
    )
    stop = next(token for token in free[0].tokens[2:8] if token not in free[1].tokens)
    stopping = DecodeOptions(threshold=0.0, block=8, max_tokens=16, stop_ids=frozenset({stop}))
    first, second = decode_block_cache(network, batch, stopping, mask_id=MASK_ID, cache_block=8)
    assert first.tokens == free[0].tokens[: free[0].tokens.index(stop) + 1]
    assert (first.finish_reason, first.forwards) == ("stop", 1)
    assert (second.tokens, second.finish_reason, second.forwards) == (free[1].tokens, "length", 2)


@dataclass(frozen=True)
class Steady:
    """Proposals that count from 0, all with the same confidence."""

    sure: float

    def proposals(self, generated: int, window: int) -> tuple[list[int], list[float]]:
        return [generated + ahead for ahead in range(window)], [self.sure] * window


def test_a_row_that_filled_its_block_idles_until_the_slowest_has(network: PreTrainedModel) -> None:
    calls = []
    hook = network.register_forward_pre_hook(lambda _module, _args: calls.append(1))
    try:
        options = DecodeOptions(threshold=0.5, block=4, max_tokens=8)
        fast, slow = decode_block_cache(
            network, [[1], [2, 3]], options, mask_id=MASK_ID, cache_block=4, script=[Steady(1.0), Steady(0.0)]
        )
    finally:
        hook.remove()
    assert fast.tokens == slow.tokens == list(range(8))
    assert (fast.forwards, slow.forwards, len(calls)) == (2, 8, 8)


def test_a_row_ends_at_its_own_length_and_idles_from_there(network: PreTrainedModel) -> None:
    options = DecodeOptions(threshold=0.5, block=4, max_tokens=8)
    short, long = decode_block_cache(
        network,
        [[1], [2, 3]],
        options,
        mask_id=MASK_ID,
        cache_block=4,
        script=[Steady(0.0), Steady(0.0)],
        lengths=[2, 5],
    )
    assert (short.tokens, short.forwards) == ([0, 1], 2)
    assert (long.tokens, long.forwards) == ([0, 1, 2, 3, 4], 5)


def test_no_prompts_give_no_results_and_an_empty_block_is_refused(network: PreTrainedModel) -> None:
    assert decode_block_cache(network, [], DecodeOptions(), mask_id=MASK_ID, cache_block=8) == []
    with pytest.raises(ConfigError, match="cache_block is 0"):
        decode_block_cache(network, [[1]], DecodeOptions(), mask_id=MASK_ID, cache_block=0)
