"""A small OpenAI-like server that does what the prompt says, well or badly, and records made by hand."""

import asyncio
import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from mars_ray.load.client import Target
from mars_ray.load.record import PlannedRequest, RequestOutcome, RequestRecord

USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "tokens_per_forward": 3.5}
SSE = "text/event-stream; charset=utf-8"

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def planned(*prompts: str, arrivals_s: tuple[float | None, ...] | None = None) -> list[PlannedRequest]:
    return [
        PlannedRequest(messages=({"role": "user", "content": prompt},), max_tokens=8, scheduled_s=arrival_s)
        for prompt, arrival_s in zip(prompts, arrivals_s or [None] * len(prompts), strict=True)
    ]


def record(**changes: Any) -> RequestRecord:
    """Sent at 1 s, chunks at 1.5, 1.75 and 2.25 s, ended at 2.5 s with 5 tokens: TTFT 500 ms, TPOT 250 ms."""
    plain = {"number": 0, "outcome": RequestOutcome.OK, "sent_s": 1.0, "chunk_s": (1.5, 1.75, 2.25), "end_s": 2.5}
    return RequestRecord(**{**plain, "completion_tokens": 5, "prompt_tokens": 10, **changes})


def event(payload: object) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


def delta(finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


ROLE, DONE = event(delta(role="assistant", content="")), b"data: [DONE]\n\n"
ANSWER = event(delta(content="one ")) + event(delta(content="two three"))
END = event(delta("stop")) + event({"choices": [], "usage": USAGE})


class SmallServer:
    """An ASGI app; the last message's content names what it does."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.clients: set[tuple[str, int]] = set()
        self.under_way = self.under_way_max = 0
        self.on_hang: Callable[[], object] = lambda: None
        self._all_here = asyncio.Event()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self.headers.append(dict(scope["headers"]))
        if scope["path"] == "/v1/models":
            return await _answer(send, {"data": [{"id": "small"}, {"id": "other"}]})
        if scope["path"] != "/v1/chat/completions":
            return await _answer(send, {"error": {"message": "no such path"}}, status=404)
        self.clients.add(tuple(scope["client"]))
        raw, more = b"", True
        while more:
            message = await receive()
            raw, more = raw + message.get("body", b""), message.get("more_body", False)
        self.bodies.append(body := json.loads(raw))
        self.under_way += 1
        self.under_way_max = max(self.under_way, self.under_way_max)
        try:
            await self._do(body["messages"][-1]["content"], body["stream"], receive, send)
        finally:
            self.under_way -= 1
        return None

    async def _do(self, what: str, stream: bool, receive: Receive, send: Send) -> None:
        statuses = {"busy": 429, "busy without a time": 429, "bad": 400, "fail": 500, "unwell": 503}
        if what.startswith("meet "):  # nobody is answered before as many are here
            if self.under_way >= int(what.split()[1]):
                self._all_here.set()
            await self._all_here.wait()
        if what in statuses:
            retry = [(b"retry-after", b"7")] if what == "busy" else []
            await _answer(send, {"error": {"message": f"it is\n{what}"}}, status=statuses[what], headers=retry)
        elif what == "page":
            await _begin(send, "text/html", 502)
            await send({"type": "http.response.body", "body": b"<h1>Bad \x1b[31m gateway</h1>"})
        elif what == "hang":
            await self._hang(receive)
        elif not stream:
            await _answer(send, {"choices": [{"message": {"content": "one two three"}}], "usage": USAGE})
        else:
            await self._stream(what, receive, send)

    async def _stream(self, what: str, receive: Receive, send: Send) -> None:
        await _begin(send, SSE, 200)
        parts = {
            "break": [ROLE + ANSWER],
            "hang inside": [ROLE + ANSWER],
            "stop short": [ROLE + ANSWER],
            "no done": [ROLE + ANSWER + END],
            "error event": [ROLE + ANSWER, event({"error": {"message": "it broke", "code": 500}}) + DONE],
            "no json": [ROLE, b"data: {one\n\n"],
            "no object": [b"data: [1]\n\n"],
            "no text": [ROLE + END + DONE],
            "no usage": [ROLE + ANSWER + event(delta("stop")) + DONE],
            "tool": [ROLE + event(delta(tool_calls=[{"index": 0}])) + END + DONE],
        }
        whole = b": hello\r\n\r\n" + (ROLE + ANSWER + END + DONE).replace(b"\n", b"\r\n")
        pieces = [whole[place : place + 7] for place in range(0, len(whole), 7)]
        for part in parts.get(what, pieces if what == "pieces" else [ROLE, ANSWER, END, DONE]):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if what == "break":
            raise ConnectionError("on purpose")
        if what in ("hang inside", "linger"):
            await self._hang(receive)
        if what == "late end":
            await asyncio.sleep(0.05)  # so that the end of the body is no part of what is read with the last event
        await send({"type": "http.response.body", "body": b""})

    async def _hang(self, receive: Receive) -> None:
        self.on_hang()
        while (await receive())["type"] != "http.disconnect":
            pass


async def _begin(send: Send, kind: str, status: int, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    head = [(b"content-type", kind.encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": head})


async def _answer(
    send: Send, payload: object, *, status: int = 200, headers: list[tuple[bytes, bytes]] | None = None
) -> None:
    await _begin(send, "application/json", status, headers)
    await send({"type": "http.response.body", "body": json.dumps(payload).encode()})


@contextmanager
def serving(app: SmallServer) -> Iterator[str]:
    """Run the app in a thread, and yield its URL. It listens already, so clients need not wait for it."""
    # asyncio switches Nagle's delay of 40 ms off only where the protocol is given by number.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen(128)
    config = uvicorn.Config(
        app, log_level="critical", lifespan="off", loop="asyncio", ws="none", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def target(url: str, **changes: Any) -> Target:
    return Target(**{"url": url, "model": "small", "timeout_s": 60.0, **changes})
