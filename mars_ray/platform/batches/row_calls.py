"""Answer the rows of batches through the routes of the endpoint, in what room callers leave.

In:    rows; a `RouteCaller`, which calls a route as a caller's request would.
Out:   results for the ledger: output lines of OpenAI's format, or lines for the errors file.
Never: gives a row an error because the endpoint has no room or no engine at the moment: such rows wait.
"""

import asyncio
import hashlib
import json
import logging
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Protocol

from mars_ray.batch.rows.row_tables import RowResult, as_json
from mars_ray.batch.run.adaptive_limit import AdaptiveLimit
from mars_ray.control.demand import TOKENS_AT_FIRST
from mars_ray.errors import MarsRayError
from mars_ray.openai_api.api_error import ENGINE_HUNG
from mars_ray.platform.batches.batch_store import StoredBatch
from mars_ray.platform.batches.input_file import BatchRow
from mars_ray.platform.usage.gateway_meter import PRICES_MISSING

log = logging.getLogger(__name__)

IN_FLIGHT = 512
"""Maximum number of rows for one model at the same time."""
PAUSE_S = 1.0
"""Seconds before a row that found no room is sent again."""
REFUSED_S = 10.0
"""Seconds of the pause of a batch after a refusal that names none."""
SPACE_S = 0.05
"""Seconds between two rows after such a pause, so that a refusal of the first stops the others."""
FAILURES = 3
"""Number of times that the endpoint fails on a row before the row gets an error."""
RETRIED = frozenset({408, 429, 502, 503, 504})
"""Statuses after which a row is sent again."""
NO_ROOM = frozenset({"overloaded", "unavailable", "replica_lost"})
"""Error codes for lack of room. Other refusals concern the batch itself: a limit of its key, missing prices, or a model
or adapter that is not ready."""


@dataclass(frozen=True, slots=True)
class RouteAnswer:
    """Answer of a route."""

    status: int
    body: Any
    """The parsed JSON."""
    request_id: str
    retry_after_s: float | None = None
    """Seconds after which the endpoint suggests another try; None if it suggests none."""


class RouteCaller(Protocol):
    """Calls the route of a batch with the batch's key, in the class of service of batches."""

    async def call(self, batch: StoredBatch, body: dict[str, Any], id: str) -> RouteAnswer:
        """Return the answer of the route to a body. Errors of the endpoint are answers. Usage with the same `id` counts
        once."""

    async def has_access(self, batch: StoredBatch) -> bool:
        """Return whether the key of a batch is still valid."""

    def model_of(self, name: str | None) -> str:
        """Return the name of the model that answers requests for a model or adapter."""


class BatchPause:
    """Pause of one batch whose rows are refused for a reason of its own. It holds no turn of the endpoint.

    It begins with a refusal and ends with the first answer after its time. Use it on one event loop.
    """

    def __init__(self) -> None:
        self._ends_s = time.monotonic()
        self._next = asyncio.Lock()
        self._ended = False
        self.limited = False
        """Whether the last refusal was one by a limit of the key, which would refuse its other batches too."""

    @property
    def left_s(self) -> float:
        """Seconds until rows may try again; negative once they may."""
        return self._ends_s - time.monotonic()

    def refused(self, retry_after_s: float | None, *, limited: bool) -> None:
        """Pause for the seconds after which the endpoint invites another try."""
        self.limited = limited
        seconds = REFUSED_S if retry_after_s is None else retry_after_s
        self._ends_s = max(self._ends_s, time.monotonic() + seconds)

    def end(self) -> None:
        """Let all rows go on."""
        self._ended = True
        self._ends_s = time.monotonic()

    async def wait(self) -> None:
        """Wait until the row of the caller may try, in line with the other rows."""
        async with self._next:
            while not self._ended and (left_s := self.left_s) > 0:
                await asyncio.sleep(left_s)
            if not self._ended:
                await asyncio.sleep(SPACE_S)


class RowCalls:
    """Sends rows to the endpoint, as many at a time as their model takes. A batch that is refused for a reason of its
    own pauses alone."""

    def __init__(self, caller: RouteCaller, in_flight: int = IN_FLIGHT) -> None:
        self.caller = caller
        self._limits = defaultdict[str, AdaptiveLimit](lambda: AdaptiveLimit(in_flight))
        """Limits by model. One that has no engine must not hold up the others."""
        self.in_flight = in_flight
        self._answered = 0
        self._tokens = 0
        self._pauses: dict[str, BatchPause] = {}
        """Pauses of batches that were refused for a reason of their own since their last answer, by id."""

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of an answer."""
        return self._tokens / self._answered if self._answered else TOKENS_AT_FIRST

    async def answer(self, batch: StoredBatch, row: BatchRow) -> RowResult:
        """Return the result of a row, however long it waits for room."""
        failures = 0
        limit = self._limits[self.caller.model_of(row.model)]
        while True:
            if (pause := self._pauses.get(batch.id)) is not None:
                await pause.wait()
            async with limit.turn() as turn:
                if self._is_paused_now(batch):
                    continue
                body = row.body()
                if body.get("stream"):
                    return refused_row(batch, row, "stream_not_supported", "a batch cannot stream; leave stream out.")
                try:
                    answer = await self.caller.call(batch, body, _line_id(batch, row))
                except MarsRayError:  # such as a storage that is away: the batch is tried again
                    raise
                except Exception:  # one row must not stop the others
                    log.exception("a row of batch %s failed", batch.id)
                    return refused_row(batch, row, "internal_error", "the server failed on this row.")
                del body
                if answer.status not in RETRIED:
                    limit.answered()
                    self._took(batch)
                    failures += answer.status >= 500
                    if answer.status < 500 or failures == FAILURES or _code(answer.body) == ENGINE_HUNG:
                        if answer.status == 200:
                            usage = answer.body.get("usage") or {}
                            self._answered += 1
                            self._tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
                        return _result(batch, row, answer)
                elif _code(answer.body) in NO_ROOM:
                    limit.refused(turn)
                else:
                    limited = answer.status == 429 or _code(answer.body) == PRICES_MISSING
                    self._pauses.setdefault(batch.id, BatchPause()).refused(answer.retry_after_s, limited=limited)
                    continue
            await asyncio.sleep(PAUSE_S)

    def is_paused(self, batch: StoredBatch) -> bool:
        """Return whether the batch pauses after a refusal that concerns this batch alone."""
        return batch.id in self._pauses

    def is_limited(self, batch: StoredBatch) -> bool:
        """Return whether the batch pauses for a limit of its key."""
        pause = self._pauses.get(batch.id)
        return pause is not None and pause.limited

    def forget(self, batch: StoredBatch) -> None:
        """End the pause of a batch that does not run any more."""
        self._pauses.pop(batch.id, None)

    def _is_paused_now(self, batch: StoredBatch) -> bool:
        pause = self._pauses.get(batch.id)
        return pause is not None and pause.left_s > 0

    def _took(self, batch: StoredBatch) -> None:
        """The endpoint has answered a row of a batch, which is within its limits."""
        if not self._is_paused_now(batch) and (pause := self._pauses.pop(batch.id, None)) is not None:
            pause.end()


def refused_row(batch: StoredBatch, row: BatchRow, code: str, message: str) -> RowResult:
    """Return the result of a row that was not sent to the endpoint."""
    error = {"code": code, "message": message}
    line = {"id": _line_id(batch, row), "custom_id": row.custom_id, "response": None, "error": error}
    return RowResult(row.key, error=as_json(line), reason=message)


def _result(batch: StoredBatch, row: BatchRow, answer: RouteAnswer) -> RowResult:
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": answer.body}
    line = as_json({"id": _line_id(batch, row), "custom_id": row.custom_id, "response": response, "error": None})
    if answer.status == 200:
        return RowResult(row.key, records=(line,))
    return RowResult(row.key, error=line, reason=json.dumps(answer.body)[:200])


def _code(body: Any) -> Any:
    return (body.get("error") or {}).get("code") if isinstance(body, dict) else None


def _line_id(batch: StoredBatch, row: BatchRow) -> str:
    return f"batch_req_{hashlib.blake2b(row.key, key=batch.id.encode(), digest_size=12).hexdigest()}"
