"""A step on CUDA mixes no devices and waits for the device once, shown without a GPU."""

import pytest
import torch

from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams
from tests.engine.fake_cuda import fake_cuda_engine, register_device_guard, say
from tests.factories.engine import Output, collect, request

TOKENS = 12


@pytest.fixture(scope="module", autouse=True)
def _device_guard(tmp_path_factory: pytest.TempPathFactory) -> None:
    register_device_guard(tmp_path_factory.mktemp("guard"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("confidence", [0.99, 0.6], ids=["accepted at masks", "verified as drafts"])
def test_steps_of_all_modes_mix_no_devices_and_read_only_tokens_and_confidences(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, confidence: float
) -> None:
    read = say(monkeypatch, token=7, confidence=confidence)
    modes = [
        DecodeParams(mode=Mode.AR),
        DecodeParams(mode=Mode.EXACT, block=8),
        DecodeParams(threshold=0.9, block=8),
        DecodeParams(threshold=0.9, block=4),
    ]
    outputs: dict[tuple[str, int], Output] = {}
    with fake_cuda_engine(dtype) as engine:
        assert engine.kernels == "torch"
        for number, decode in enumerate(modes):  # a prompt that arrives later makes the second rectangle of attention
            prompt = range(5, 25 + 200 * number)
            engine.add(request(number, prompt, decode, max_tokens=TOKENS, ignore_eos=True))
            collect(outputs, engine.step())
        while engine.busy:
            collect(outputs, engine.step())
    assert [output.finished.error for output in outputs.values()] == [None] * len(modes)
    assert [output.tokens for output in outputs.values()] == [[7] * TOKENS] * len(modes)
    assert {tensor.device.type for tensors in read for tensor in tensors} == {"cuda"}
    assert outputs["2", 0].finished.forwards < TOKENS


def test_a_fake_step_fails_where_the_host_reads_a_value() -> None:
    outputs: dict[tuple[str, int], Output] = {}
    with fake_cuda_engine(torch.float32) as engine:
        engine.add(request(0, range(5, 25)))
        collect(outputs, engine.step())
    assert "DataDependentOutputException" in str(outputs["0", 0].finished.error)
