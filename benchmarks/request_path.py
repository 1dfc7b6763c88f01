"""Count the files that a chat request passes on its way in, and the generators that its answer returns through.

Gateway, client and engine run in this process, without Ray and without the platform. A file counts once if one of its
functions runs between the socket's first byte in the app and `Engine.add`. A generator counts if it yields for each
chunk. Between the two processes of a cluster, `serve/ray/ray_engine_client` and `serve/ray/engine_replica` take the
place of `LocalEngineClient`. The tokenizer's process is not counted.

    python -m benchmarks.request_path
"""

import asyncio
import inspect
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2

import mars_ray
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.process.messages import EngineFacts, OrderSocket
from mars_ray.engine.process.worker import serve_engine
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.model.token_bytes import token_bytes
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.program import run_program
from mars_ray.serve.deploy.serve_config import ServeConfig
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.gateway_app import make_gateway_app
from mars_ray.serve.http.models import ModelClients, OneModel
from mars_ray.serve.replicas.engine_client import LocalEngineClient
from mars_ray.serve.replicas.engine_metrics import EngineMetrics

ROOT = Path(mars_ray.__file__).parent
BODY = {"messages": [{"role": "user", "content": "Count to ten."}], "stream": True, "max_tokens": 32}
WRAPPED = "async_generator_wrapped_value"
"""Type of what an asynchronous generator returns to the interpreter when it yields."""


class Recorder:
    """A profile function that notes the files of functions until `Engine.add`, then the generators that yield."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget what was noted."""
        self.files: dict[str, None] = {}
        self.generators = Counter[str]()
        self._added = False

    def __call__(self, frame: FrameType, event: str, value: Any) -> None:
        """Note a call, or a value that an asynchronous generator yields."""
        code = frame.f_code
        if not code.co_filename.startswith(str(ROOT)):
            return
        name = str(Path(code.co_filename).relative_to(ROOT))
        if event == "call" and not self._added:
            self.files[name] = None
            self._added = code is Engine.add.__code__
        elif event == "return" and code.co_flags & inspect.CO_ASYNC_GENERATOR and type(value).__name__ == WRAPPED:
            self.generators[f"{name} {code.co_qualname}"] += 1


async def main() -> None:
    """Send one chat request twice, and print the files and the generators of the second."""
    config = ServeConfig()
    folder = resolve_model(config.model)
    checkpoint = load_checkpoint(folder)
    engine = Engine(checkpoint, EngineOptions())
    ours, theirs = socket.socketpair()
    serving = threading.Thread(target=serve_engine, args=(engine, OrderSocket(theirs)), daemon=True)
    recorder = Recorder()
    threading.setprofile(recorder)
    serving.start()
    threading.setprofile(None)
    front = AsyncEngine()
    front.attach(*await asyncio.open_connection(sock=ours))
    facts = EngineFacts(
        max_model_len=engine.limits.max_model_len,
        vocab_size=engine.limits.vocab_size,
        block=engine.block,
        token_bytes=token_bytes(checkpoint.tokenizer),
    )
    client = LocalEngineClient(
        front, ModelInfo(name="bundled", created=1, engine=facts), EngineMetrics(model="bundled", replica="here")
    )
    unused: Any = None
    models = OneModel(ModelClients(Endpoint(client, config, folder), unused))
    app = make_gateway_app(models, config, name="here")
    async with (
        models.running(),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost") as http,
    ):
        (await http.post("/v1/chat/completions", json=BODY)).raise_for_status()
        await front.state()  # the engine has ended its step
        recorder.begin()
        sys.setprofile(recorder)
        answer = await http.post("/v1/chat/completions", json=BODY)
        sys.setprofile(None)
    await front.close()
    await asyncio.to_thread(serving.join)
    assert answer.text.endswith("data: [DONE]\n\n")
    print(f"{len(recorder.files)} files in:")
    print(*(f"  {name}" for name in recorder.files), sep="\n")
    generators = [name for name, count in recorder.generators.items() if count > 2]
    print(f"{len(generators)} generators out:")
    print(*(f"  {name}" for name in generators), sep="\n")


if __name__ == "__main__":
    run_program("benchmarks.request_path", lambda: asyncio.run(main()))
