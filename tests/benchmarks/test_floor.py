"""Bytes and operations against sums done by hand."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import floor
from benchmarks.floor import MachineLimits, StepFloor, StepNeeds, measure_limits, step_needs
from tests.factories.networks import tiny_network

# Per layer: q and o 8 x 8, k and v 8 x 4, three matrices 8 x 16. One query head has 4 numbers, one cached token 2 x 4.
LAYER = 2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 16
TABLE = 20 * 8
BIASES_AND_NORMS = 2 * ((8 + 4 + 4) + 2 * 8) + 8


def tiny(*, tied: bool, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    sizes: dict[str, Any] = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    return tiny_network(**sizes, num_key_value_heads=1, tie_word_embeddings=tied).to(dtype)


@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_counts_once_as_the_output_matrix(tied: bool) -> None:
    needs = step_needs(tiny(tied=tied), rows=3, positions=1, context=0)
    assert needs.weight_bytes == 4 * (2 * LAYER + TABLE + BIASES_AND_NORMS)
    assert needs.matrix_flops == 2 * (2 * LAYER + TABLE) * 3


def test_keys_and_values_are_read_for_the_context_and_written_for_the_window() -> None:
    needs = step_needs(tiny(tied=True, dtype=torch.bfloat16), rows=3, positions=5, context=10)
    token_bytes = 2 * 2 * 4 * 2  # keys and values, layers, numbers of the one head, bytes of a number
    assert needs.cache_read_bytes == 3 * 10 * token_bytes
    assert needs.cache_written_bytes == 3 * 5 * token_bytes
    assert needs.bytes == 2 * (2 * LAYER + TABLE + BIASES_AND_NORMS) + 3 * 15 * token_bytes


def test_attention_is_causal_inside_the_window() -> None:
    needs = step_needs(tiny(tied=True), rows=3, positions=2, context=10)
    pairs = 3 * (11 + 12)
    assert needs.attention_flops == 2 * 2 * pairs * 2 * (4 + 4)  # multiply and add, layers, heads, scores and values


def test_the_floor_is_the_larger_of_moving_and_computing() -> None:
    needs = StepNeeds(
        weight_bytes=80, cache_read_bytes=15, cache_written_bytes=5, matrix_flops=900, attention_flops=100
    )
    slow_memory = MachineLimits(memory_bytes_per_s=10, model_bytes_per_s=20, gemm_flops_per_s=1000)
    slow_cores = MachineLimits(memory_bytes_per_s=10, model_bytes_per_s=1000, gemm_flops_per_s=100)
    assert (StepFloor(needs, slow_memory).seconds, StepFloor(needs, slow_cores).seconds) == (5.0, 10.0)


def test_the_limits_of_this_machine_are_plausible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor, "BEYOND_CACHE_BYTES", 2**24)
    limits = measure_limits(tiny(tied=True), positions=4)
    assert 1e8 < limits.memory_bytes_per_s < 1e13
    assert limits.model_bytes_per_s > 0 and limits.gemm_flops_per_s > 0
