"""Engines with vLLM in processes of a real cluster, on a CPU under Triton's interpreter."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import mars_ray
from tests.vllm import INTERPRETER

if find_spec("vllm") is None or find_spec("ray") is None:
    pytest.skip("vLLM or Ray is missing in this environment: run make test-vllm", allow_module_level=True)

import ray
from ray import serve

VLLM_ARGS: dict[str, Any] = {"enforce_eager": True, "max_model_len": 512}
ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": os.pathsep.join((str(INTERPRETER), str(Path(mars_ray.__file__).parents[1]))),
}


@contextmanager
def cluster(cpus: int) -> Iterator[None]:
    """Start a cluster whose processes run vLLM as here, and end it with its applications."""
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    ray.init(
        address="local", num_cpus=cpus, include_dashboard=False, object_store_memory=200_000_000, log_to_driver=False
    )
    yield
    serve.shutdown()
    ray.shutdown()
    os.environ.clear()
    os.environ.update(before)
