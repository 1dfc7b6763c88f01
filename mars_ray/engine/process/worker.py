"""The engine process: it reads orders from a socket between steps, and runs steps while there is work.

The process survives failing requests, and ends when its parent ends. `messages` defines the orders and events.
"""

import ctypes
import logging
import os
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import torch

from mars_ray.adapter.card import unnamed
from mars_ray.engine.choose_engine import choose_engine
from mars_ray.engine.core.decoding_engine import DecodingEngine
from mars_ray.engine.core.load import best_device, start_engine
from mars_ray.engine.grammar.library import GrammarTokenizer
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.process.adapter_worker import AdapterWorker
from mars_ray.engine.process.collector import ChunkCollector
from mars_ray.engine.process.messages import (
    Add,
    AskState,
    Cancel,
    EngineFacts,
    EngineSpec,
    Failed,
    Forget,
    ForgetAdapter,
    Launch,
    LoadAdapter,
    Order,
    OrderSocket,
    Prepare,
    Prepared,
    Refused,
    SetThresholds,
    Started,
    UseAdapters,
)
from mars_ray.errors import GrammarError, MarsRayError, ReplicaLostError, StepError
from mars_ray.model.folder import check_folder
from mars_ray.model.token_bytes import token_bytes

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
NICE = 5
"""Niceness of the engine process, so that the process that feeds it runs first: requests that wait outside the engine
are invisible to the threshold controller."""
COMPILING = 4
"""Maximum number of grammars compiled at the same time."""


def serve_engine(engine: DecodingEngine, orders: OrderSocket) -> None:
    """Handle orders and run steps until the other end closes the socket."""
    alive: dict[str, int] = {}
    """Number of running sequences of each request."""
    collector = ChunkCollector()
    compiling = ThreadPoolExecutor(COMPILING)
    adapters = AdapterWorker(engine, orders)
    try:
        while True:
            while orders.waiting() or not engine.busy:
                order = orders.receive()
                if order is None:
                    return
                match order:
                    case Prepare(grammar):
                        compiling.submit(_prepare, grammar, engine, orders)
                    case LoadAdapter() | UseAdapters() | ForgetAdapter():
                        adapters.obey(order)
                    case _:
                        _obey(order, engine, orders, alive, collector)
            _step(engine, orders, alive, collector)
    except ConnectionError:
        return
    finally:
        compiling.shutdown(wait=False)
        adapters.close()
        engine.close()


def _obey(
    order: Order, engine: DecodingEngine, orders: OrderSocket, alive: dict[str, int], collector: ChunkCollector
) -> None:
    match order:
        case Add(request, stream):
            try:
                engine.add(request)
                if not stream:
                    collector.collect(request.id)
                alive[request.id] = len(request.indices)
            except MarsRayError as error:
                orders.send(Refused(request.id, error))
            except Exception as bug:  # other requests go on
                log.exception("request %s cannot be added", request.id)
                orders.send(Refused(request.id, StepError(f"the request cannot be added: {bug!r}.")))
        case Cancel(request_id):
            engine.cancel(request_id)
        case AskState():
            orders.send(engine.state())
        case Forget(grammar):
            engine.grammars.forget(grammar)
        case SetThresholds(by_class):
            try:
                engine.set_thresholds(by_class)
            except MarsRayError as error:
                log.error("the thresholds are unchanged: %s", error)


def _prepare(grammar: GrammarSpec, engine: DecodingEngine, orders: OrderSocket) -> None:
    """Compile a grammar in this thread and send `Prepared`. The compiler releases the interpreter lock."""
    error: MarsRayError | None = None
    try:
        engine.grammars.prepare(grammar)
    except MarsRayError as refused:
        error = refused
    except Exception as bug:
        log.exception("a grammar cannot be compiled")
        error = StepError(f"the grammar cannot be compiled: {bug!r}.")
    with suppress(ConnectionError):
        orders.send(Prepared(grammar, error))


def _step(engine: DecodingEngine, orders: OrderSocket, alive: dict[str, int], collector: ChunkCollector) -> None:
    try:
        chunks = engine.step()
    except ReplicaLostError:
        raise
    except Exception as error:  # even after a bug in the engine, all requests must end
        log.exception("a step failed")
        for request_id in alive:
            engine.cancel(request_id)
            collector.forget(request_id)
            orders.send(Refused(request_id, StepError(f"decoding failed: {error!r}.")))
        alive.clear()
        return
    if ready := collector.add(chunks):
        orders.send(ready)
    for chunk in chunks:
        if chunk.finished and chunk.request_id in alive:
            alive[chunk.request_id] -= 1
            if not alive[chunk.request_id]:
                del alive[chunk.request_id]
                collector.forget(chunk.request_id)


def main(descriptor: int, parent: int) -> None:
    """Start the engine that the first message on a socket describes, and serve it. `parent` is a process id."""
    if sys.platform == "linux":  # makes the kernel end this process with its parent, even during a step that hangs
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
    os.nice(NICE)
    orders = OrderSocket(socket.socket(fileno=descriptor))
    launch = orders.receive()
    if launch is None:
        return
    assert isinstance(launch, Launch)
    os.environ.clear()
    os.environ.update(launch.environment)
    try:
        engine, facts = _start(launch.spec)
        started = Started(facts, _grammar_tokenizer(engine))
    except MarsRayError as error:
        orders.send(Failed(error))
        return
    orders.send(started)
    serve_engine(engine, orders)


def _start(spec: EngineSpec) -> tuple[DecodingEngine, EngineFacts]:
    torch.set_num_threads(spec.threads)
    device = best_device()
    model = check_folder(spec.folder, spec.dtype, device)
    # The client sends the adapters with a name once the engine runs.
    options = replace(spec.options, engine=choose_engine(model, spec.options, spec.adapters, device=device))
    engine, tokenizer = start_engine(model, options, unnamed(spec.adapters.get(None)))
    # Standard error goes to the log of the parent process.
    print(f"engine on {device}, {engine.kernels}; {model.dtype.name}: {model.dtype.reason}", file=sys.stderr)
    if options.notice:
        print(f"engine with {options.notice}", file=sys.stderr)
    return engine, EngineFacts(
        max_model_len=engine.limits.max_model_len,
        vocab_size=engine.limits.vocab_size,
        block=engine.block,
        token_bytes=token_bytes(tokenizer),
        notice=options.notice,
    )


def _grammar_tokenizer(engine: DecodingEngine) -> GrammarTokenizer | None:
    """Load the tokenizer for grammars before the first step, so that no step waits for it."""
    try:
        return engine.grammars.load()
    except GrammarError as error:
        log.warning("%s", error)
        return None
