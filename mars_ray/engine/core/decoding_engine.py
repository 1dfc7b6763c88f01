"""The interface of an engine: requests in, chunks out, state for operators and the controller.

`Engine` implements it here, and `mars_ray.vllm.engine` over vLLM. Engine processes, `LLM`, jobs and endpoints use
nothing else of an engine, so they work the same with both.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.core.adapters import LoadedAdapter
from mars_ray.engine.core.limits import EngineLimits
from mars_ray.engine.grammar.matcher import Grammars
from mars_ray.engine.request import Request
from mars_ray.engine.stats.state import EngineState


class DecodingEngine(Protocol):
    """An engine whose caller calls `step` while it is busy.

    Not thread-safe, except for `grammars.prepare` and `load_adapter`.
    """

    limits: EngineLimits
    grammars: Grammars
    kernels: str
    """Description of the code that runs the network, for reports."""

    @property
    def block(self) -> int:
        """Maximum number of tokens proposed per forward, for requests that set no block."""

    @property
    def running(self) -> int:
        """Number of sequences that decode or read their prompt."""

    @property
    def waiting(self) -> int:
        """Number of sequences in the waiting queue."""

    @property
    def busy(self) -> bool:
        """True while a step has work to do or chunks to return."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestError` for an invalid request and `QueueFullError` if the queue is full."""

    def cancel(self, request_id: str) -> None:
        """End a request at once. Unknown ids are ignored."""

    def step(self) -> list[Chunk]:
        """Decode one step. Raises `ReplicaLostError` if the engine cannot go on; its process must then end."""

    def state(self) -> EngineState:
        """Return a snapshot for operators and the controller."""

    def set_thresholds(self, thresholds: Mapping[str, float]) -> None:
        """Set the thresholds of some classes from the next step on. Raises `ConfigError` and then changes nothing."""

    def load_adapter(self, folder: Path) -> LoadedAdapter:
        """Load and pack the adapter in `folder`. Any thread may call it, one at a time, next to the steps.

        Raises `AdapterError` if the adapter is missing, incomplete, or does not fit the model or the engine.
        """

    def set_adapters(self, adapters: Mapping[str, LoadedAdapter]) -> None:
        """Replace the adapters with a name between two steps. Requests keep the adapter that they began with."""

    def close(self) -> None:
        """Stop the engine. Call no other method afterwards."""
