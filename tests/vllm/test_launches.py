"""Number of kernels that the plug-in adds to a step of vLLM."""

import sys
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
if find_spec("vllm") is None:
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)

from tests.vllm.interpreted import BUNDLED, SamplingParams, engine  # noqa: E402, I001

from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
import triton  # noqa: E402
import vllm  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

import mars_ray.vllm  # noqa: E402

PLUGIN, *OTHERS = (str(Path(str(package.__file__)).parent) for package in (mars_ray.vllm, vllm, triton))
MOST = 4
"""Most launches per step: the mask token's logits, the layout, the confidences and the outcome."""


class OurOperations(TorchDispatchMode):
    """Counts the torch operations that files of the plug-in call and that run a kernel; views and memory run none."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        writes = func._schema.is_mutable or not shares_memory(result, args)
        if writes and "empty" not in func.name() and is_ours():
            self.counts[func.name()] += 1
        return result


def shares_memory(result: Any, args: tuple[Any, ...]) -> bool:
    memory = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
    return isinstance(result, Tensor) and result.untyped_storage().data_ptr() in memory


def callers() -> Iterator[str]:
    frame = sys._getframe().f_back
    while frame:
        yield frame.f_code.co_filename
        frame = frame.f_back


def is_ours() -> bool:
    """Whether the nearest file of the plug-in, of vLLM or of Triton on the stack is one of the plug-in."""
    return next((file.startswith(PLUGIN) for file in callers() if file.startswith((PLUGIN, *OTHERS))), False)


def test_a_step_adds_a_handful_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = OurOperations()
    launch = InterpretedFunction.run

    def counted(kernel: Any, *arguments: Any, **named: Any) -> Any:
        if kernel.fn.__module__.startswith("mars_ray.vllm"):
            operations.counts[kernel.fn.__name__] += 1
        return launch(kernel, *arguments, **named)

    monkeypatch.setattr(InterpretedFunction, "run", counted)
    llm = engine({"threshold": 0.9}, BUNDLED, skip_tokenizer_init=True)
    for number in range(3):
        sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, detokenize=False)
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": [5, 6, 7, 8]}, sampling)
    for _ in range(3):
        llm.llm_engine.step()
    operations.counts.clear()
    with operations:
        llm.llm_engine.step()
    assert 0 < operations.counts.total() <= MOST, operations.counts
