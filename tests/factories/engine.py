"""Engines, and requests that they run to their end."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from mars_ray.engine.chunk import Chunk, Finished, TokenLogprobs
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.process.grammar_checker import GrammarChecker
from mars_ray.engine.process.messages import EngineSpec, OrderSocket
from mars_ray.engine.process.worker import serve_engine
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.engine.service_class import STANDARD
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import resolve_model

STEPS_MAX = 20_000

MakeEngine = Callable[..., Engine]


class Prompts(list[tuple[int, ...]]):
    """Prompts that a failing test does not print."""

    def __repr__(self) -> str:
        return f"<{len(self)} prompts>"


@dataclass
class Output:
    """Everything said about one sequence."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    endings: list[Finished] = field(default_factory=list)

    @property
    def finished(self) -> Finished:
        assert len(self.endings) == 1, "a sequence ends exactly once"
        return self.endings[0]


def engine_processes(pid: int) -> list[psutil.Process]:
    """Return the engine processes that a process has started."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name() == "mars-ray-engine":
                found.append(process)
    return found


def bundled_checkpoint(**loading: Any) -> Checkpoint:
    """Load the bundled model: engines replace the attention of a network, so that an oracle needs one of its own."""
    return load_checkpoint(resolve_model("bundled"), **loading)


def as_unknown(checkpoint: Checkpoint) -> Checkpoint:
    """Give the network a class of its own, which the kernels do not know."""
    checkpoint.network.__class__ = type("Unknown", (type(checkpoint.network),), {})
    return checkpoint


def engine_of(checkpoint: Checkpoint, parts: Mapping[str, Any] = MappingProxyType({}), **options: Any) -> Engine:
    """Return an engine; `parts` are further arguments of `Engine`."""
    return Engine(checkpoint, EngineOptions(**options), **({"new_seed": lambda: 0} | dict(parts)))


def engine_spec(folder: Path, **options: Any) -> EngineSpec:
    """Return what starts an engine in a process of its own."""
    return EngineSpec(folder=folder, dtype="float32", threads=1, options=EngineOptions(**options))


def request(
    number: object,
    prompt: Iterable[int],
    decode: DecodeParams | None = None,
    *,
    service_class: str = STANDARD,
    **sampling: Any,
) -> Request:
    return Request(
        id=str(number),
        prompt=tuple(prompt),
        service_class=service_class,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        decode=decode or DecodeParams(),
    )


def collect(outputs: dict[tuple[str, int], Output], chunks: Iterable[Chunk]) -> None:
    for chunk in chunks:
        output = outputs.setdefault((chunk.request_id, chunk.index), Output())
        assert not output.endings, "nothing follows the last chunk"
        output.tokens += chunk.tokens
        output.text += chunk.text
        output.logprobs += chunk.logprobs
        output.chunks.append(chunk)
        if chunk.finished:
            output.endings.append(chunk.finished)


def run(
    engine: Engine, requests: Iterable[Request], before_step: Callable[[int], None] = lambda _: None
) -> dict[str, Output]:
    """Add all requests at once and step until all have ended; outputs by id, those of n > 1 as "id/index"."""
    requests = list(requests)
    for each in requests:
        engine.add(each)
    outputs: dict[tuple[str, int], Output] = {}
    for number in range(STEPS_MAX):
        if not engine.busy:
            break
        before_step(number)
        collect(outputs, engine.step())
    assert not engine.busy, "every request ends"
    several = {each.id for each in requests if each.sampling.n > 1}
    return {f"{name}/{index}" if name in several else name: each for (name, index), each in outputs.items()}


@asynccontextmanager
async def started_engine(spec: EngineSpec, **options: Any) -> AsyncIterator[AsyncEngine]:
    """Start an engine in a process of its own, with `options` of `AsyncEngine.start`, and close it at the end."""
    engine, _ = await AsyncEngine.start(spec, **options)
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def serving(engine: Engine, **options: Any) -> AsyncIterator[AsyncEngine]:
    """Run an engine in a thread, and yield its client, which is made with `options`."""
    ours, theirs = socket.socketpair()
    worker = threading.Thread(target=serve_engine, args=(engine, OrderSocket(theirs)))
    worker.start()
    front = AsyncEngine(**options)
    checker = GrammarChecker(engine.grammars.load())
    front.attach(*await asyncio.open_connection(sock=ours), checker)
    try:
        yield front
    finally:
        await front.close()
        await checker.close()
        await asyncio.to_thread(worker.join)
        theirs.close()
