"""What grammars cost, found out where a grammar that never ends can be killed.

In:    grammars.
Out:   the memory that each takes, or the reason why it cannot be used; both are remembered.
Never: compiles in this process, or lets the grammars of one tenant hold up those of another.
"""

import asyncio
import hashlib
import json
import sys
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import count
from typing import Any

from mars_ray.engine.grammar.library import GrammarTokenizer, unusable
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.errors import GrammarError, StepError

AT_A_TIME, PER_TENANT = 4, 2
"""Grammars that are checked and compiled at a time: in all, and of one tenant."""
REMEMBERED = 4096
"""Results that are kept: 4 MB at most, as they are kept by digest."""
START_SECONDS = 60.0


class GrammarChecker:
    """Asks a process of its own (`grammar/check_worker`), started with the first grammar; use it in one event loop."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known = OrderedDict[bytes, int | str]()
        self._places = asyncio.Semaphore(AT_A_TIME)
        self._places_of = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(PER_TENANT))
        self._starting, self._numbers = asyncio.Lock(), count()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait until another grammar of this tenant may be checked and compiled."""
        async with self._places_of[tenant], self._places:
            yield

    async def cost(self, spec: GrammarSpec) -> int:
        """Return the bytes that a grammar takes. Raises `GrammarError`; `StepError` when it cannot be found out."""
        digest = hashlib.sha256(f"{spec.kind} {spec.text}".encode(errors="surrogatepass")).digest()
        if digest not in self._known:
            self._known[digest] = await self._checked(spec)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        self._known.move_to_end(digest)
        if isinstance(known := self._known[digest], str):
            raise GrammarError(known)
        return known

    async def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _checked(self, spec: GrammarSpec) -> int | str:
        try:
            process = await self._started()
            number = next(self._numbers)
            answer = self._asked[number] = asyncio.get_running_loop().create_future()
            _write(process, {"id": number, "kind": spec.kind, "text": spec.text})
            said = await answer
        except (ConnectionError, TimeoutError) as error:
            raise StepError("the process that checks grammars died. Send the request again.") from error
        match said:
            case {"bytes": int(size)}:
                return size
            case {"error": str(reason)}:
                return reason
        raise unusable(spec, "this busy machine did not compile it in time; simplify it, or try again later")

    async def _started(self) -> asyncio.subprocess.Process:
        async with self._starting:
            if self._process is None or self._reading is None or self._reading.done():
                await self.close()
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "mars_ray.engine.grammar.check_worker"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                )
                _write(self._process, asdict(self._tokenizer))
                assert self._process.stdout is not None
                async with asyncio.timeout(START_SECONDS):
                    if not await self._process.stdout.readline():
                        raise ConnectionResetError
                self._reading = asyncio.create_task(self._read(self._process.stdout))
            return self._process

    async def _read(self, answers: asyncio.StreamReader) -> None:
        try:
            while line := await answers.readline():
                said = json.loads(line)
                if not (asked := self._asked.pop(said["id"])).done():
                    asked.set_result(said)
        finally:
            for asked in self._asked.values():
                if not asked.done():
                    asked.set_exception(ConnectionResetError())
            self._asked.clear()


def _write(process: asyncio.subprocess.Process, message: dict[str, Any]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(message).encode() + b"\n")
