"""Void keys never enter the prefix cache. vLLM 0.33 enters the blocks of accepted tokens after each step; earlier
versions, which run here, wait for the next step of the request. So the tests give the scheduler the rule of 0.33.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
if find_spec("vllm") is None:
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)

from tests.vllm.interpreted import LLM, SamplingParams, engine, tokens_of  # noqa: E402, I001

from tests.vllm.test_engine import BLOCK_SIZE, prompts  # noqa: E402


def give_rule_of_033(scheduler: Any) -> None:
    """Enter blocks in the cache after each step, as `Scheduler.update_from_output` of vLLM 0.33 does."""
    update: Callable[..., tuple[list[int], bool]] = scheduler._update_request_with_output

    def update_and_enter(request: Any, *arguments: Any, **named: Any) -> tuple[list[int], bool]:
        returned = update(request, *arguments, **named)
        # 0.33 takes the tokens that a stop cut off back from the computed ones; the newest token has no key.
        scheduler.kv_cache_manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens - 1))
        return returned

    scheduler._update_request_with_output = update_and_enter


def next_turns(llm: LLM) -> tuple[list[list[int]], list[list[int]]]:
    """Exact tokens of a second turn with the first turn in the cache, and with an empty cache.

    The first turn trusts its tokens, and ends two tokens after the end of a block: its last step yields the tokens that
    complete the block, and no step follows that would compute their keys.
    """
    tokenizer = llm.get_tokenizer()
    chats = [[{"role": "user", "content": text}] for text in prompts()[::2]]
    first = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True).input_ids for chat in chats
    ]
    trusted = [
        SamplingParams(
            temperature=0.0,
            max_tokens=2 * BLOCK_SIZE - len(ids) % BLOCK_SIZE + 2,
            ignore_eos=True,
            extra_args={"threshold": 0.3},
        )
        for ids in first
    ]
    answers = tokens_of(llm.generate([{"prompt_token_ids": ids} for ids in first], trusted, use_tqdm=False))
    turns = [{"prompt_token_ids": [*ids, *answer, *ids]} for ids, answer in zip(first, answers, strict=True)]
    exact = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, extra_args={"mode": "exact"})
    warm = llm.generate(turns, exact, use_tqdm=False)
    llm.reset_prefix_cache()
    cold = llm.generate(turns, exact, use_tqdm=False)
    assert all(output.num_cached_tokens > len(ids) for output, ids in zip(warm, first, strict=True))
    assert [output.num_cached_tokens for output in cold] == [0] * len(cold)
    return tokens_of(warm), tokens_of(cold)


@pytest.fixture(params=[False, True], ids=["waiting", "async"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return caching_engine(async_scheduling=request.param)


def caching_engine(*, async_scheduling: bool) -> LLM:
    return engine({"block": 8}, async_scheduling=async_scheduling, enable_prefix_caching=True, block_size=BLOCK_SIZE)


def scheduler_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def test_the_next_turn_reads_right_keys(llm):
    give_rule_of_033(scheduler_of(llm))
    warm, cold = next_turns(llm)
    assert warm == cold


def test_without_the_cap_the_next_turn_reads_void_keys():
    llm = caching_engine(async_scheduling=False)
    give_rule_of_033(scheduler_of(llm))
    del scheduler_of(llm).kv_cache_manager.coordinator.cache_blocks  # ours; the class's own remains
    warm, cold = next_turns(llm)
    assert warm != cold
