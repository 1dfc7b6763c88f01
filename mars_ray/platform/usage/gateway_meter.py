"""The meter as one gateway uses it: each request before it runs, and its usage before the last byte of its answer.

In:    the exchanges of a gateway; a link to the meter of all gateways.
Out:   grants and refusals as callers see them; records, each sent until the meter confirms it.
Never: lets a request with limits run without a grant, or keeps an answer from a caller because the meter is away.

A request without limits needs no grant. While the meter is away, such requests are answered and their records wait
here. Requests with limits wait up to `ADMIT_S` seconds for the meter, and are then refused with 503.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import count
from uuid import uuid4

from mars_ray.errors import UnavailableError
from mars_ray.openai_api.api_error import NO_RETRY, ApiError
from mars_ray.platform.accounts.callers import limits_of
from mars_ray.platform.usage.limiter import WINDOW_S, Allowance, Granted, LimitedRequest, LimitRefusal, RecentRequest
from mars_ray.platform.usage.meter import MeterLink, MeterMessage
from mars_ray.platform.usage.record_spool import RecordSpool
from mars_ray.platform.usage.usage_rows import TokenPrices, UsageCounts, UsageGroup, UsageRecord, day_of
from mars_ray.serve.http.extension import Meter
from mars_ray.serve.http.streams import cancel_tasks
from mars_ray.serve.middleware.exchange import Exchange

log = logging.getLogger(__name__)

ADMIT_S = 5.0
"""Seconds that a request with limits waits for a meter that does not answer."""
CONFIRM_S = 10.0
"""Seconds that an answer waits for its record to be durable. The record is kept and sent later if that takes longer."""
RENEW_S = 2.0
"""Seconds between two messages of an idle gateway, by which the meter knows that the gateway lives."""
RETRY_S = 0.2
CLIENT_LEFT = 499
"""Status in the log for a client that disconnected before its answer."""
PRICES_MISSING = "prices_missing"
"""Error code of a key with a budget in money on an endpoint without prices."""


@dataclass(slots=True)
class _Running:
    """A request from its admission until a minute later or until its record is stored, whichever is later."""

    group: UsageGroup
    limited: LimitedRequest | None
    """The request with its limits; None without limits."""
    admitted_s: float
    counted: bool = False


class GatewayMeter(Meter):
    """The meter in one gateway. Use it within one event loop, inside `async with meter.running()`."""

    def __init__(
        self,
        link: MeterLink,
        prices: TokenPrices | None,
        *,
        name: str,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self.link = link
        self.refused = Counter[str]()
        """Requests that a limit refused, by the name of the limit."""
        self._prices = prices
        self._name = f"{name}:{uuid4().hex}"
        self._unix_clock = unix_clock
        self._running: dict[str, _Running] = {}
        self._recent: dict[str, _Running] = {}
        self._asked: dict[str, tuple[LimitedRequest, asyncio.Future[Granted | LimitRefusal]]] = {}
        self._ended: list[str] = []
        self._numbers = count()
        self._news = asyncio.Event()
        self._silent_since_s: float | None = None
        self._forgot_s = time.monotonic()
        self._spool = RecordSpool(link, self._end_all)

    @property
    def records_waiting(self) -> int:
        """Number of records that the meter has not confirmed."""
        return self._spool.waiting

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Speak with the meter within the block. At its end, the records that still wait are sent."""
        self._news.set()  # so that the meter starts before the first request
        asking = asyncio.create_task(self._ask_forever())
        try:
            async with self._spool.running(CONFIRM_S):
                yield
        finally:
            await cancel_tasks(asking)

    async def admit(self, exchange: Exchange, model: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Admit a request that may use up to these tokens. Raises an `ApiError` if a limit or the meter refuses it."""
        id = exchange.meter_id or uuid4().hex
        group = UsageGroup(day_of(self._unix_clock()), exchange.owner, exchange.key or "", model)
        limited = None
        if limits := limits_of(exchange):
            limited = LimitedRequest(
                id=id,
                day=group.day,
                tokens=prompt_tokens + answer_tokens,
                price_billionths=self._most(exchange, prompt_tokens, answer_tokens),
                limits=limits,
            )
            answer = await self._decided(limited)
            exchange.headers = allowance_headers(answer if isinstance(answer, Granted) else answer.left)
            if isinstance(answer, LimitRefusal):
                self.refused[answer.limit] += 1
                raise limit_error(answer)
        exchange.meter_id = id
        self._running[id] = _Running(group, limited, time.monotonic())
        if limited:
            self._recent[id] = self._running[id]

    async def count(self, exchange: Exchange) -> None:
        """Count an answered request. Returns once its record is durable, or if the meter does not answer."""
        if running := self._running.get(exchange.meter_id or ""):
            record = self._record(exchange, running)
            await self._spool.confirmed(record, CONFIRM_S, reserved=running.limited is not None)

    def end(self, exchange: Exchange) -> None:
        """End a request that was admitted, however it ended. What was cut counts with the tokens that it used."""
        if (running := self._running.pop(exchange.meter_id or "", None)) is None or running.counted:
            return
        left = exchange.status in (None, CLIENT_LEFT)
        if exchange.usage and (exchange.usage.tokens or left):
            self._spool.add(self._record(exchange, running), reserved=running.limited is not None)
        elif running.limited:
            self._release(running.limited.id)

    def forget(self, exchange: Exchange) -> None:
        """End a request that is repeated with the same id unless it was counted. What it used is not counted."""
        running = self._running.pop(exchange.meter_id or "", None)
        if running and running.limited and not running.counted:
            self._release(running.limited.id)

    def _most(self, exchange: Exchange, prompt_tokens: int, answer_tokens: int) -> int:
        if self._prices:
            return self._prices.most_billionths(prompt_tokens, answer_tokens)
        for holder, limits in limits_of(exchange).items():
            if limits.money_per_day is not None or limits.money_per_month is not None:
                log.error("%s has a budget in money, but the serve config sets no prices; its requests fail", holder)
                message = (
                    "The key has a budget in money, but this endpoint has no prices. Ask its operator to set prices."
                )
                raise ApiError(503, message, type="server_error", code=PRICES_MISSING)
        return 0

    def _record(self, exchange: Exchange, running: _Running) -> UsageRecord:
        running.counted = True
        usage = exchange.usage
        assert usage
        tokens = (usage.prompt_tokens, usage.cached_tokens, usage.tokens)
        counts = UsageCounts.of(usage, self._prices.billionths(*tokens) if self._prices else 0)
        if running.limited:
            running.limited = replace(running.limited, tokens=counts.tokens)
        return UsageRecord(exchange.meter_id or "", running.group, counts)

    async def _decided(self, request: LimitedRequest) -> Granted | LimitRefusal:
        """Return the decision of the meter. Raises an `ApiError` if the meter does not answer in time."""
        silent_s = 0.0 if self._silent_since_s is None else time.monotonic() - self._silent_since_s
        future: asyncio.Future[Granted | LimitRefusal] = asyncio.get_running_loop().create_future()
        self._asked[request.id] = (request, future)
        self._news.set()
        decided = False
        try:
            async with asyncio.timeout(max(0.0, ADMIT_S - silent_s)):
                answer = await future
            decided = True
            return answer
        except TimeoutError:
            message = "The meter of usage does not answer, so that keys with limits cannot be served. Try again later."
            raise ApiError.unavailable(message, "unavailable", ADMIT_S) from None
        finally:
            del self._asked[request.id]
            if not decided:  # the meter may have granted it
                self._release(request.id)

    def _release(self, id: str) -> None:
        if running := self._recent.get(id):
            assert running.limited
            running.limited = replace(running.limited, tokens=0)
            running.counted = True
        self._end_all([id])

    def _end_all(self, ids: list[str]) -> None:
        self._ended += ids
        self._news.set()

    async def _ask_forever(self) -> None:
        introduce = False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._news.wait()
            self._news.clear()
            try:
                introduce = await self._ask(introduce)
                self._silent_since_s = None
            except UnavailableError as error:
                if self._silent_since_s is None:
                    self._silent_since_s = time.monotonic()
                    log.warning("the meter of usage does not answer: %s", error)
                self._news.set()
                await asyncio.sleep(RETRY_S)

    async def _ask(self, introduce: bool) -> bool:
        """Send one message, and return whether the meter wants an introduction."""
        self._forget_old()
        ended = tuple(self._ended)
        message = MeterMessage(
            gateway=self._name,
            number=next(self._numbers),
            # An answered request is in `_asked` until its coroutine runs. Sent again, it could hold quota for nobody.
            requests=[request for request, future in self._asked.values() if not future.done()],
            ended=ended,
            recent=self._introduction() if introduce else None,
        )
        reply = await self.link.sync(message)
        if reply.introduce:
            self._news.set()
            return True
        del self._ended[: len(ended)]
        if reply.wait:
            self._news.set()
            await asyncio.sleep(RETRY_S)
        for id, answer in reply.answers.items():
            if id in self._asked:
                future = self._asked[id][1]
                if not future.done():
                    future.set_result(answer)
        return False

    def _introduction(self) -> list[RecentRequest]:
        now_s = time.monotonic()
        return [
            RecentRequest(request=running.limited, age_s=now_s - running.admitted_s, running=self._holds(id, running))
            for id, running in self._recent.items()
            if running.limited
        ]

    def _holds(self, id: str, running: _Running) -> bool:
        """Return whether a request holds quota, because it runs or because its record is not stored yet."""
        return not running.counted or self._spool.holds(id)

    def _forget_old(self) -> None:
        """Forget the requests that have left the window and hold nothing, at most once a second."""
        now_s = time.monotonic()
        if now_s - self._forgot_s < 1:
            return
        self._forgot_s = now_s
        self._recent = {
            id: running
            for id, running in self._recent.items()
            if self._holds(id, running) or now_s - running.admitted_s <= WINDOW_S + 1
        }


def allowance_headers(left: Granted) -> dict[str, str]:
    """Return OpenAI's headers about what is left of the limits per minute."""
    return dict([*_headers("requests", left.requests), *_headers("tokens", left.tokens)])


def _headers(name: str, allowance: Allowance | None) -> Iterator[tuple[str, str]]:
    if allowance:
        yield f"x-ratelimit-limit-{name}", str(allowance.limit)
        yield f"x-ratelimit-remaining-{name}", str(allowance.remaining)
        yield f"x-ratelimit-reset-{name}", duration(allowance.reset_s)


def duration(seconds: float) -> str:
    """Return a time as in OpenAI's headers, such as 1m3s, 12s or 250ms."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def limit_error(refusal: LimitRefusal) -> ApiError:
    """Return the error for a refused request.

    A rate is a 429 with `retry-after`. A spent budget is a 429 `insufficient_quota`, as from OpenAI, because clients
    know it, while a 402 is an unknown error to them. A request that can never run is a 400.
    """
    match refusal.kind:
        case "too_large":
            return ApiError.bad_request(refusal.message, "max_tokens", "request_exceeds_limit")
        case "budget":
            return ApiError(
                429, refusal.message, type="insufficient_quota", code="insufficient_quota", headers=NO_RETRY
            )
        case _:
            seconds = str(max(1, math.ceil(refusal.retry_after_s)))
            message = f"{refusal.message} Try again in {seconds} s."
            headers = {"retry-after": seconds}
            return ApiError(429, message, type="rate_limit_error", code="rate_limit_exceeded", headers=headers)
