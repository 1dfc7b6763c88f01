"""Functions run in forks of a process that has imported torch and transformers, which takes other processes seconds."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


@cache
def _server() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(["mars_ray.model.sources.gguf_worker", "tests.model.gguf_samples"])
    return context


def in_fork(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `function` returns in a process of its own, which ends then."""
    with ProcessPoolExecutor(1, mp_context=_server()) as pool:
        return pool.submit(function, *args, **kwargs).result()
