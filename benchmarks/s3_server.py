"""An S3 store for tests and measurements: moto's server, optionally durable across kills.

    python -m benchmarks.s3_server 9000 --recording writes.jsonl --slow-down 0.1

Moto keeps its objects in memory. With `--recording` every write is recorded before it is performed, and repeated at the
next start. So a restarted server has all objects again, including those of writes whose answer was lost. `--slow-down`
answers a share of all requests with 503 SlowDown, as an overloaded store does.
"""

import argparse
import base64
import json
import random
import threading
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

Environ = dict[str, Any]
Application = Callable[[Environ, Callable[..., Any]], Iterable[bytes]]
SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--recording", type=Path)
    parser.add_argument("--slow-down", type=float, default=0.0)
    arguments = parser.parse_args()
    store: Application = DomainDispatcherApplication(create_backend_app)
    if arguments.recording:
        store = recorded(store, arguments.recording)
    if arguments.slow_down:
        store = slowed_down(store, arguments.slow_down)
    run_simple(arguments.host, arguments.port, store, threaded=True, request_handler=MotoRequestHandler)


def recorded(store: Application, path: Path) -> Application:
    """Repeat the writes recorded in `path`; return a store that records new writes there."""
    if path.exists():
        for line in path.read_text().splitlines():
            environ, body = json.loads(line)
            for _ in store(_with_body(environ, base64.b64decode(body)), lambda *_: None):
                pass
    lock = threading.Lock()

    def handle(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return store(environ, start_response)
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        texts = {name: value for name, value in environ.items() if isinstance(value, str)}
        line = json.dumps([texts, base64.b64encode(body).decode()]) + "\n"
        with lock, path.open("a") as file:
            file.write(line)
        return store(_with_body(environ, body), start_response)

    return handle


def slowed_down(store: Application, share: float) -> Application:
    """Return a store that refuses a share of the requests."""
    chance = random.Random(0)

    def handle(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        if chance.random() >= share:
            return store(environ, start_response)
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(SLOW_DOWN)))])
        return [SLOW_DOWN]

    return handle


def _with_body(environ: Environ, body: bytes) -> Environ:
    fresh = {"wsgi.errors": BytesIO(), "wsgi.version": (1, 0), "wsgi.url_scheme": "http", "wsgi.multithread": True}
    return fresh | environ | {"wsgi.input": BytesIO(body)}


if __name__ == "__main__":
    main()
