"""A lossless adapter on two ranks that share a network, which exchange their parts with gloo."""

import os
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
if find_spec("vllm") is None:
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)

from tests.vllm.interpreted import LLM  # noqa: E402, I001

from tests.vllm import INTERPRETER  # noqa: E402
from tests.vllm.small_adapters import MASK, adapter_of, base_of, choices_with  # noqa: E402
from tests.vllm.causal_reference import decode_causally  # noqa: E402
from tests.vllm.small_networks import BLOCK, MAX_TOKENS, decode, prompts, small_engine  # noqa: E402


@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_two_ranks_return_the_tokens_of_the_plain_rule(architecture, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(INTERPRETER), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    base = base_of(architecture, tmp_path / "base")
    adapter = adapter_of(base, tmp_path / "adapter")
    two: LLM = small_engine(base, {"adapter": str(adapter)}, tensor_parallel_size=2, distributed_executor_backend="mp")
    rule: dict[str, Any] = {"threshold": 1.0, "masks": BLOCK - 1, "mask_id": MASK, "max_tokens": MAX_TOKENS}
    choices = choices_with(base, adapter)
    answers = [decode_causally(choices, ids, **rule) for ids in prompts()]
    assert decode(two, {"mode": "exact"}) == [answer.tokens for answer in answers]
    record = two.collective_rpc("mars_record")
    after_prompts = sum(answer.forwards - 1 for answer in answers)
    assert record[0]["lookahead"]["forwards"] == after_prompts
    assert record[0]["lookahead"] == record[1]["lookahead"]
