"""Requests that arrive and are aborted at any step, with prompts read in chunks and a shared prefix cache."""

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
if find_spec("vllm") is None:
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)

from tests.vllm.interpreted import LLM, SamplingParams  # noqa: E402, I001

from hypothesis import HealthCheck, given, settings, strategies as st  # noqa: E402

from mars_ray.model.card import write_card  # noqa: E402
from tests.factories.cards import model_card  # noqa: E402
from tests.vllm.causal_reference import choices_of, decode_causally  # noqa: E402
from tests.vllm.small_networks import BLOCK, MASK, MAX_TOKENS, prompts, small_engine, small_network  # noqa: E402

POSITIONS = 2 * BLOCK - 1
numbers = count()


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: int
    threshold: float
    block: int
    max_tokens: int
    aborted_at: int | None


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 8),
    prompt=st.integers(0, 5),
    threshold=st.sampled_from([1.0, 0.8, 0.5]),
    block=st.sampled_from([1, 3, BLOCK]),
    max_tokens=st.integers(1, MAX_TOKENS),
    aborted_at=st.none() | st.integers(1, 12),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    small_network("llama").save_pretrained(folder)
    write_card(model_card(block=BLOCK, mask_token_id=MASK), folder)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["waiting", "async"])
def mars(request: pytest.FixtureRequest, folder: Path) -> LLM:
    return small_engine(
        folder,
        {},
        async_scheduling=request.param,
        enable_prefix_caching=True,
        block_size=32,
        max_num_seqs=4,
        max_num_batched_tokens=5 * POSITIONS,
        long_prefill_token_threshold=POSITIONS,
    )


@cache
def plain(folder: Path, prompt: int, threshold: float, block: int) -> list[int]:
    rule: dict[str, Any] = {"threshold": threshold, "masks": block - 1, "mask_id": MASK, "max_tokens": MAX_TOKENS}
    return decode_causally(choices_of(folder, MASK), prompts()[prompt], **rule).tokens


def run(llm: LLM, schedule: list[Arrival]) -> dict[int, list[int]]:
    """Tokens of each request when all steps are done."""
    core = llm.llm_engine
    names = {index: f"request-{next(numbers)}" for index in range(len(schedule))}
    index_of = {name: index for index, name in names.items()}
    tokens: dict[int, list[int]] = {index: [] for index in names}
    step = 0
    while step <= max(arrival.step for arrival in schedule) or core.has_unfinished_requests():
        for index, arrival in enumerate(schedule):
            if arrival.step == step:
                extra = {"threshold": arrival.threshold, "block": arrival.block}
                params = SamplingParams(
                    temperature=0.0, max_tokens=arrival.max_tokens, detokenize=False, extra_args=extra
                )
                core.add_request(names[index], {"prompt_token_ids": prompts()[arrival.prompt]}, params)
            if arrival.aborted_at is not None and arrival.step + arrival.aborted_at == step:
                core.abort_request([names[index]])
        for output in core.step():
            tokens[index_of[output.request_id]] = list(output.outputs[0].token_ids)
        step += 1
    return tokens


@given(schedule=st.lists(arrivals, min_size=1, max_size=6))
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_requests_get_the_tokens_of_the_plain_rule_whenever_they_come_and_go(mars, folder, schedule):
    tokens = run(mars, schedule)
    for index, arrival in enumerate(schedule):
        expected = plain(folder, arrival.prompt, arrival.threshold, arrival.block)[: arrival.max_tokens]
        if arrival.aborted_at is None:
            assert tokens[index] == expected
        else:
            assert tokens[index] == expected[: len(tokens[index])]
