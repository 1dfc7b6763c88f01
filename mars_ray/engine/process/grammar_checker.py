"""Measure the cost of grammars in a child process, where a compilation that does not end can be killed.

In:    It takes the grammars of requests.
Out:   It returns the memory that each grammar takes, or the reason for refusing it, and remembers these results.
Never: It never compiles in this process, and never lets the grammars of one tenant delay those of another.

`LLM` and a job's own schema are compiled in the user's process without these limits, because the user wrote them.
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

AT_A_TIME = 4
"""Maximum number of grammars checked or compiled at the same time."""
PER_TENANT = 2
"""Maximum number of grammars of one tenant checked or compiled at the same time."""
REMEMBERED = 4096
"""Maximum number of results kept. They take at most 4 MB, because keys are digests."""


class GrammarChecker:
    """Checks grammars in a child process (`grammar/check_worker`) that is started for the first grammar.

    Use it in one event loop.
    """

    def __init__(self, tokenizer: GrammarTokenizer) -> None:
        self._tokenizer = tokenizer
        self._results = OrderedDict[bytes, int | str]()
        """Memory in bytes, or the reason for a refusal, keyed by the digest of the grammar."""
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._turns_of = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(PER_TENANT))
        self._starting = asyncio.Lock()
        self._numbers = count()
        self._child: JsonProcess | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for permission to check or compile a grammar of this tenant, and hold it during the `with` block."""
        async with self._turns_of[tenant], self._turns:
            yield

    async def cost(self, spec: GrammarSpec) -> int:
        """Return the memory that a grammar takes, in bytes.

        Raises `GrammarError` if the grammar cannot be used, and `StepError` if the check itself failed.
        """
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
        """Kill the child process."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        child = self._child
        self._child = None
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
