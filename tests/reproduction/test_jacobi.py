"""Jacobi decoding against the reference decoder, one token at a time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from mars_ray.errors import ConfigError
from mars_ray.method.reference import DecodeOptions, decode
from mars_ray.model.checkpoint import Checkpoint
from pipelines.reproduction.baselines.jacobi import decode_jacobi
from tests.factories.token_rows import MASK_ID

prompt = st.lists(st.integers(0, MASK_ID - 1), min_size=1, max_size=9)


@given(
    prompts=st.lists(prompt, max_size=3),
    block=st.integers(1, 9),
    max_tokens=st.integers(1, 20),
    stop_ids=st.frozensets(st.integers(0, MASK_ID - 1), max_size=6),
)
def test_it_gives_the_tokens_of_autoregressive_decoding(
    exact_network: PreTrainedModel, prompts: list[list[int]], block: int, max_tokens: int, stop_ids: frozenset[int]
) -> None:
    answers = decode_jacobi(
        exact_network, prompts, block=block, max_tokens=max_tokens, stop_ids=stop_ids, mask_id=MASK_ID
    )
    options = DecodeOptions(mode="ar", max_tokens=max_tokens, stop_ids=stop_ids)
    expected = decode(exact_network, prompts, options, mask_id=MASK_ID)
    assert [(a.tokens, a.finish_reason) for a in answers] == [(e.tokens, e.finish_reason) for e in expected]
    assert all(1 <= answer.forwards <= len(answer.tokens) for answer in answers)


def test_tokens_that_repeat_are_guessed(repeating_network: PreTrainedModel) -> None:
    """A network that says its last token again is right in every guess: a forward gives the whole window."""
    (answer,) = decode_jacobi(
        repeating_network, [[5, 9]], block=3, max_tokens=12, stop_ids=frozenset(), mask_id=MASK_ID
    )
    assert (answer.tokens, answer.forwards) == ([9] * 12, 3)


def test_a_forward_reads_the_window_and_what_is_new_only(exact_network: PreTrainedModel) -> None:
    read = []
    hook = exact_network.register_forward_pre_hook(
        lambda _module, _args, inputs: read.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        decode_jacobi(exact_network, [[1, 2, 3, 4]], block=5, max_tokens=40, stop_ids=frozenset(), mask_id=MASK_ID)
    finally:
        hook.remove()
    assert read[0] == 4 + 5
    assert set(read[1:-5]) == {6}


def test_the_bundled_model_gives_its_own_tokens_in_fewer_forwards(
    bundled: Checkpoint, bundled_prompts: list[list[int]]
) -> None:
    how: dict[str, Any] = {"max_tokens": 32, "stop_ids": bundled.stop_ids}
    answers = decode_jacobi(bundled.network, bundled_prompts, block=8, mask_id=bundled.mask_id, **how)
    expected = decode(bundled.network, bundled_prompts, DecodeOptions(mode="ar", **how), mask_id=bundled.mask_id)
    assert [answer.tokens for answer in answers] == [each.tokens for each in expected]
    assert sum(answer.forwards for answer in answers) < sum(len(answer.tokens) for answer in answers)


def test_a_window_without_guesses_is_refused(exact_network: PreTrainedModel) -> None:
    with pytest.raises(ConfigError, match="block is 0"):
        decode_jacobi(exact_network, [[1]], block=0, max_tokens=4, stop_ids=frozenset(), mask_id=MASK_ID)
    with pytest.raises(ConfigError, match="max_tokens is 0"):
        decode_jacobi(exact_network, [[1]], block=2, max_tokens=0, stop_ids=frozenset(), mask_id=MASK_ID)
