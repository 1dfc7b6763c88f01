"""What one engine takes, and how its sizes come from the model and the machine."""

from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from transformers import Phi3Config, Qwen2Config

from mars_ray.engine.core.limits import (
    MAX_NUM_SEQS_ON_CPU,
    MAX_NUM_SEQS_ON_GPU,
    MEMORY_SHARE,
    EngineLimits,
    free_memory_bytes,
    resolve_limits,
)
from mars_ray.engine.kv.cache import bytes_per_token
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import Request, SamplingParams
from mars_ray.errors import ConfigError, ModelError, PromptTooLongError, RequestError

LIMITS = EngineLimits(
    max_model_len=8, vocab_size=100, max_num_seqs=2, max_kv_tokens=16, max_waiting_seqs=4, max_request_tokens=512
)
CPU = torch.device("cpu")


def config(**changes: int) -> Qwen2Config:
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return Qwen2Config(vocab_size=100, max_position_embeddings=64, **(sizes | changes))


def resolved(of: Qwen2Config, **given: int | None) -> EngineLimits:
    sizes = {"max_waiting_seqs": 4, "max_request_tokens": 512} | given
    return resolve_limits(of, torch.float32, CPU, EngineOptions(**sizes))  # type: ignore[arg-type]


def check(prompt: tuple[int, ...] = (1,), **sampling: Any) -> None:
    LIMITS.check(Request(id="a", prompt=prompt, sampling=SamplingParams(**sampling)))  # type: ignore[arg-type]


def test_a_sequence_ends_where_longrope_would_change_the_frequencies_of_its_earlier_tokens() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    of = Phi3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=64,
        original_max_position_embeddings=16,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )
    limits = resolve_limits(of, torch.float32, CPU, EngineOptions())
    assert limits.max_model_len == 16


def test_a_request_inside_every_limit_is_taken() -> None:
    check(prompt=(0, 99) * 3 + (5,), n=4, max_tokens=128, logit_bias={99: 1.0}, stop_token_ids=frozenset({99}))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        check(prompt=())


@pytest.mark.parametrize("length", [8, 9, 5000])
def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_both_lengths(length: int) -> None:
    with pytest.raises(PromptTooLongError, match=rf"\b{length}\b.*\b8\b"):
        check(prompt=(1,) * length)


def test_a_prompt_of_which_only_scores_are_wanted_may_fill_the_context() -> None:
    check(prompt=(1,) * 8, max_tokens=0, prompt_logprobs=0)
    with pytest.raises(PromptTooLongError, match=r"\b9\b.*\b8\b"):
        check(prompt=(1,) * 9, max_tokens=0, prompt_logprobs=0)
    with pytest.raises(PromptTooLongError, match=r"\b8\b.*\b8\b"):
        check(prompt=(1,) * 8, max_tokens=1, prompt_logprobs=0)


@pytest.mark.parametrize("token", [-1, 100, 2**70])
def test_a_token_outside_the_vocabulary_is_refused_wherever_it_stands(token: int) -> None:
    with pytest.raises(RequestError, match=rf"prompt.* {token}\b"):
        check(prompt=(1, token, 2))
    if token > 0:
        with pytest.raises(RequestError, match=rf"logit_bias.* {token}\b"):
            check(logit_bias={5: 1.0, token: 1.0})
        with pytest.raises(RequestError, match=rf"stop_token_ids.* {token}\b"):
            check(stop_token_ids=frozenset({5, token}))


def test_all_sequences_of_a_request_share_its_token_limit() -> None:
    check(n=2, max_tokens=256)
    with pytest.raises(RequestError, match=r"2 x 257 = 514.*512"):
        check(n=2, max_tokens=257)


def test_a_request_of_more_sequences_than_may_wait_is_refused() -> None:
    with pytest.raises(RequestError, match=r"\b5\b.*\b4\b"):
        check(n=5, max_tokens=1)


def test_the_sizes_of_a_small_model_are_those_of_full_slots() -> None:
    limits = resolved(config())
    assert limits.max_num_seqs == MAX_NUM_SEQS_ON_CPU < MAX_NUM_SEQS_ON_GPU
    assert limits.max_kv_tokens == MAX_NUM_SEQS_ON_CPU * 64
    assert (limits.max_model_len, limits.vocab_size) == (64, 100)


def test_the_cache_of_a_large_model_takes_its_share_of_the_memory() -> None:
    large = config(num_hidden_layers=100, hidden_size=2**15, num_attention_heads=256, num_key_value_heads=256)
    large.max_position_embeddings = 2**30
    taken = resolved(large).max_kv_tokens * bytes_per_token(large, torch.float32)
    assert 0 < taken <= MEMORY_SHARE * psutil.virtual_memory().total


def test_a_model_no_position_of_which_fits_is_refused() -> None:
    huge = config(hidden_size=2**50)
    with pytest.raises(ConfigError, match="memory"):
        resolved(huge)


def test_what_the_operator_sets_is_kept_and_bounds_a_sequence() -> None:
    limits = resolved(config(), max_num_seqs=3, max_kv_tokens=40, max_waiting_seqs=7, max_request_tokens=9)
    wanted = EngineLimits(
        max_model_len=40, vocab_size=100, max_num_seqs=3, max_kv_tokens=40, max_waiting_seqs=7, max_request_tokens=9
    )
    assert limits == wanted
    assert resolved(config(), max_num_seqs=3, max_kv_tokens=1000) == replace(
        wanted, max_model_len=64, max_kv_tokens=1000, max_waiting_seqs=4, max_request_tokens=512
    )


@pytest.mark.parametrize(
    "name", ["max_num_seqs", "max_kv_tokens", "max_waiting_seqs", "max_request_tokens", "max_prefill_tokens"]
)
@pytest.mark.parametrize("value", [0, -1])
def test_a_size_below_one_is_refused_by_name_and_value(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        resolved(config(), **{name: value})


def test_query_heads_that_are_no_multiple_of_the_key_heads_are_refused() -> None:
    with pytest.raises(ModelError, match="4 query heads and 3 key heads"):
        resolved(config(num_key_value_heads=3))


def test_a_cache_of_one_position_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_kv_tokens is 1"):
        resolved(config(), max_kv_tokens=1)
    assert resolved(config(), max_kv_tokens=2).max_model_len == 2


def test_a_token_takes_what_the_documentation_says() -> None:
    qwen_7b = config(num_hidden_layers=28, hidden_size=3584, num_attention_heads=28, num_key_value_heads=4)
    assert bytes_per_token(qwen_7b, torch.bfloat16) == 2 * 28 * 4 * 128 * 2


def test_the_free_memory_is_part_of_the_memory_there_is() -> None:
    assert 0 < free_memory_bytes(CPU) <= psutil.virtual_memory().total
