"""An engine whose tensors are fake CUDA tensors, which have devices, dtypes and shapes but no values.

An operation on tensors of different devices raises an error, and so does reading a value, which on a real device makes
the host wait.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mars_ray.engine.core.engine import Engine
from mars_ray.engine.execution import torch_runner
from mars_ray.model.checkpoint import Checkpoint
from tests.factories.engine import bundled_checkpoint, engine_of

# A build of torch without CUDA refuses to index even fake CUDA tensors, because it has no class that selects a device.
NO_OP_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace {
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
}
"""


def register_device_guard(folder: Path) -> None:
    """Let this process index fake CUDA tensors; skip the test without a C++ compiler."""
    if torch.backends.cuda.is_built():
        return
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is missing, and this build of torch has no CUDA")
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(NO_OP_GUARD)
    home = Path(torch.__file__).parent
    command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", str(source), "-o", str(library)]
    subprocess.run([*command, f"-L{home / 'lib'}", "-lc10"], check=True, capture_output=True, timeout=200)
    ctypes.CDLL(str(library))


@contextmanager
def fake_cuda_engine(dtype: torch.dtype) -> Iterator[Engine]:
    """The engine of a model like the bundled one, with two layers, on a fake GPU. Leaves the fake mode when the context
    ends."""
    real = bundled_checkpoint()
    config = type(real.network.config)(**real.network.config.to_dict() | {"num_hidden_layers": 2, "layer_types": None})
    with FakeTensorMode():
        with torch.device("cuda"):
            network = type(real.network)._from_config(config, dtype=dtype).eval()
        yield engine_of(
            Checkpoint(network=network, tokenizer=real.tokenizer, mask_id=real.mask_id, card=real.card),
            max_num_seqs=4,
            max_kv_tokens=2048,
        )


def say(monkeypatch: pytest.MonkeyPatch, token: int, confidence: float) -> list[tuple[Tensor, Tensor]]:
    """Let the network choose `token` with `confidence` everywhere; return the tensors that the engine reads."""
    read: list[tuple[Tensor, Tensor]] = []

    def to_host(token_M: Tensor, confidence_M: Tensor) -> tuple[list[int], list[float]]:
        read.append((token_M, confidence_M))
        return [token] * len(token_M), [confidence] * len(confidence_M)

    monkeypatch.setattr(torch_runner, "to_host", to_host)
    return read
