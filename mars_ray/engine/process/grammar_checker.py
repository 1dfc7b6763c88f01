"""Measure the cost of grammars in a child process, where a grammar that never ends can be killed.

In:    grammars.
Out:   the memory that each takes, or the reason why it cannot be used; both are remembered.
Never: compiles in this process, or lets the grammars of one tenant hold up those of another.
"""

import asyncio
import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from itertools import count
from typing import Any

from mars_ray.engine.grammar.library import GrammarTokenizer, unusable
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.process.json_process import JsonProcess
from mars_ray.errors import GrammarError, StepError

AT_A_TIME, PER_TENANT = 4, 2
"""Grammars checked or compiled at a time: in all, and for one tenant."""
REMEMBERED = 4096
"""Number of results kept: at most 4 MB, because the key is a digest."""


class GrammarChecker:
    """Checks grammars in a child (`grammar/check_worker`) that the first grammar starts; use it in one event loop."""

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._results = OrderedDict[bytes, int | str]()
        """Bytes, or the reason for a refusal, by digest of the grammar."""
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._turns_of = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(PER_TENANT))
        self._starting = asyncio.Lock()
        self._numbers = count()
        self._child: JsonProcess | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait until another grammar of this tenant may be checked or compiled."""
        async with self._turns_of[tenant], self._turns:
            yield

    async def cost(self, spec: GrammarSpec) -> int:
        """Return the bytes that a grammar takes. Raises `GrammarError`; `StepError` if the check itself failed."""
        digest = hashlib.sha256(f"{spec.kind} {spec.text}".encode(errors="surrogatepass")).digest()
        if digest not in self._results:
            self._results[digest] = await self._check(spec)
            if len(self._results) > REMEMBERED:
                self._results.popitem(last=False)
        self._results.move_to_end(digest)
        if isinstance(result := self._results[digest], str):
            raise GrammarError(result)
        return result

    async def close(self) -> None:
        """End the child."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    async def _check(self, spec: GrammarSpec) -> int | str:
        try:
            child = await self._started()
            number = next(self._numbers)
            answer = self._answers[number] = asyncio.get_running_loop().create_future()
            child.send({"id": number, "kind": spec.kind, "text": spec.text})
            result = await answer
        except (ConnectionError, TimeoutError) as error:
            raise StepError("the process that checks grammars died. Send the request again.") from error
        match result:
            case {"bytes": int(size)}:
                return size
            case {"error": str(reason)}:
                return reason
        raise unusable(spec, "this busy machine did not compile it in time; simplify it, or try again later")

    async def _started(self) -> JsonProcess:
        async with self._starting:
            if self._child is None or self._reading is None or self._reading.done():
                await self.close()
                self._child, _ = await JsonProcess.start(
                    "mars_ray.engine.grammar.check_worker", first=asdict(self._tokenizer)
                )
                self._reading = asyncio.create_task(self._read(self._child))
            return self._child

    async def _read(self, child: JsonProcess) -> None:
        try:
            while True:
                message = await child.receive()
                if not (answer := self._answers.pop(message["id"])).done():
                    answer.set_result(message)
        except ConnectionError:
            return
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ConnectionResetError())
            self._answers.clear()
