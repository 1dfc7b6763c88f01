"""Gateways and a meter that loses messages: limits hold, nothing counts twice, others never notice."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.errors import QueueFullError, UnavailableError
from mars_ray.openai_api.api_error import ApiError, api_error
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.platform.accounts.account_store import UsageLimits
from mars_ray.platform.accounts.callers import AccountCaller
from mars_ray.platform.usage import gateway_meter, record_spool
from mars_ray.platform.usage.gateway_meter import GatewayMeter
from mars_ray.platform.usage.ledger import LedgerView, UsageLedger
from mars_ray.platform.usage.limiter import Granted, LimitedRequest, RecentRequest
from mars_ray.platform.usage.meter import MeterMessage, MeterReply, UsageMeter
from mars_ray.platform.usage.usage_report import COLUMNS, UsageQuery
from mars_ray.platform.usage.usage_rows import TokenPrices, UsageCounts, UsageGroup, UsageRecord, UsageSums, day_of
from mars_ray.serve.middleware.exchange import Exchange

FOREVER = UsageQuery("0000-01-01", "9999-12-31", COLUMNS)
NOON = 1_764_072_000.0


class Link:
    """A way to a meter that can be restarted, and that loses messages or replies as `lose` says."""

    def __init__(self, folder: Path, lose: Callable[[], str] = lambda: "") -> None:
        self._folder = folder
        self.lose = lose
        self.calls = 0
        self.restart()

    def restart(self) -> None:
        self.meter = UsageMeter(UsageLedger(self._folder))

    async def _call(self, method: str, *args: Any) -> Any:
        self.calls += 1
        lost = self.lose()
        if lost == "message":
            raise UnavailableError("lost")
        reply = await getattr(self.meter, method)(*args)
        if lost == "reply":
            raise UnavailableError("lost")
        return reply

    async def sync(self, message: MeterMessage) -> MeterReply:
        reply: MeterReply = await self._call("sync", message)
        return reply

    async def record(self, records: Sequence[UsageRecord]) -> None:
        await self._call("record", records)

    async def report(self, query: UsageQuery, account: str | None) -> UsageSums:
        sums: UsageSums = await self._call("report", query, account)
        return sums


def exchange(key: str = "ada", status: int | None = 200, **limits: Any) -> Exchange:
    made = Exchange(request_id="same", method="POST", path="/v1/completions", arrived_unix_s=0, key=key, owner="acme")
    made.status = status
    held = {"account:acme": UsageLimits(**limits)} if limits else {}
    made.caller = AccountCaller(key=key, owner="acme", role="use", service_class=None, limits=held)
    return made


async def answered(meter: GatewayMeter, used: int, most: int = 10, **fields: Any) -> Exchange:
    """Make one request of a prompt of one token that uses `used` tokens in all."""
    made = exchange(**fields)
    made.usage = ResponseUsage(prompt_tokens=1)
    await meter.admit(made, "bundled", 1, most - 1)
    try:
        await asyncio.sleep(0)
        made.usage.tokens = used - 1
        await meter.count(made)
    finally:
        meter.end(made)
    return made


async def until_granted(meter: GatewayMeter) -> None:
    """Use one token once the meter answers again."""
    for _ in range(10_000):
        try:
            await answered(meter, 1, tokens_per_minute=100)
            return
        except ApiError as error:
            assert error.status == 503
    raise AssertionError("the gateway never finds the meter again")


async def total(link: Link) -> UsageCounts:
    sums = list((await link.meter.report(FOREVER, None)).values())
    return sum(sums[1:], sums[0]) if sums else UsageCounts(requests=0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds in a cluster takes less here."""
    for module in (gateway_meter, record_spool):
        monkeypatch.setattr(module, "RETRY_S", 0.001)
    monkeypatch.setattr(gateway_meter, "ADMIT_S", 0.2)
    monkeypatch.setattr(gateway_meter, "CONFIRM_S", 0.2)
    monkeypatch.setattr(record_spool, "LONGEST_RETRY_S", 0.001)


@given(
    st.integers(0, 10**6),
    st.lists(st.integers(1, 10), min_size=1, max_size=60),
    st.integers(20, 200),
    st.integers(1, 3),
    st.booleans(),
)
def test_several_gateways_keep_limits_and_count_once_through_lost_messages_and_a_restart(
    seed: int, used: list[int], limit: int, gateways: int, restart: bool
) -> None:
    chance = random.Random(seed)
    granted: list[int] = []

    async def one(meter: GatewayMeter, tokens: int) -> None:
        try:
            await answered(meter, tokens, tokens_per_minute=limit, tokens_per_day=limit)
        except ApiError as error:
            assert error.status in (400, 429), error
        else:
            granted.append(tokens)

    async def run(folder: Path) -> None:
        link = Link(folder, lambda: chance.choice(["", "", "", "message", "reply"]))
        async with AsyncExitStack() as running:
            meters = [GatewayMeter(link, None, name="g") for _ in range(gateways)]
            for meter in meters:
                await running.enter_async_context(meter.running())
            half = len(used) // 2
            await asyncio.gather(*(one(chance.choice(meters), tokens) for tokens in used[:half]))
            if restart:
                link.restart()
            await asyncio.gather(*(one(chance.choice(meters), tokens) for tokens in used[half:]))
        counted = await total(link)
        assert (counted.requests, counted.tokens) == (len(granted), sum(granted))
        assert counted.tokens <= limit, "also after a restart, because the gateways introduce themselves"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway_meter, "ADMIT_S", 20.0)
        patch.setattr(gateway_meter, "CONFIRM_S", 20.0)
        asyncio.run(run(_folder()))


def _folder() -> Path:
    from tempfile import mkdtemp

    return Path(mkdtemp(prefix="usage-"))


def test_parallel_requests_do_not_overshoot_and_get_headers_that_say_what_is_left(tmp_path: Path) -> None:
    async def run() -> None:
        link = Link(tmp_path)
        meter = GatewayMeter(link, None, name="g")
        async with meter.running():
            done = await asyncio.gather(
                *(answered(meter, 10, tokens_per_minute=100, requests_per_minute=50) for _ in range(30)),
                return_exceptions=True,
            )
        assert sum(isinstance(each, Exchange) for each in done) == 10
        [last] = [each for each in done if isinstance(each, Exchange)][-1:]
        assert last.headers["x-ratelimit-limit-tokens"] == "100"
        assert last.headers["x-ratelimit-remaining-tokens"] == "0"
        assert last.headers["x-ratelimit-remaining-requests"] == "40"
        refused = next(each for each in done if isinstance(each, ApiError))
        assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused.headers["retry-after"]) <= 61
        assert (await total(link)).tokens == 100

    asyncio.run(run())


def test_requests_without_limits_ask_nothing_and_are_counted(tmp_path: Path) -> None:
    async def run() -> None:
        link = Link(tmp_path)
        meter = GatewayMeter(link, TokenPrices(prompt=1, answered=10), name="g", unix_clock=lambda: NOON)
        async with meter.running():
            await answered(meter, 3)
            await answered(meter, 1000, most=2000)
        [(group, counts)] = (await link.meter.report(FOREVER, None)).items()
        assert group == UsageGroup(day_of(NOON), "acme", "ada", "bundled")
        assert counts.requests == 2
        assert counts.price_billionths == 2 * 1_000 + (2 + 999) * 10_000

    asyncio.run(run())


def test_while_the_meter_is_away_limits_are_a_503_and_others_are_answered_and_counted_later(tmp_path: Path) -> None:
    async def run() -> None:
        away = True
        link = Link(tmp_path, lambda: "message" if away else "")
        meter = GatewayMeter(link, None, name="g")
        async with meter.running():
            with pytest.raises(ApiError) as refused:
                await answered(meter, 1, tokens_per_minute=100)
            assert (refused.value.status, refused.value.code) == (503, "unavailable")
            assert "retry-after" in refused.value.headers
            for _ in range(3):
                await answered(meter, 5)
            assert (await total(link)).requests == 0
            away = False
            await until_granted(meter)
        assert (await total(link)).tokens == 16

    asyncio.run(run())


def test_a_spool_adds_up_what_was_never_sent_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_spool, "SPOOL_RECORDS", 10)

    async def run() -> None:
        away = True
        link = Link(tmp_path, lambda: "reply" if away else "")
        meter = GatewayMeter(link, None, name="g")
        async with meter.running():
            for number in range(100):
                await answered(meter, 2, key=f"key{number % 3}")
            away = False
        assert (await total(link)).requests == 100
        assert (await total(link)).tokens == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "tokens", "requests"), [(200, 5, 1), (499, 0, 1), (None, 0, 1), (503, 0, 0), (400, 0, 0)]
)
def test_what_was_cut_counts_with_what_it_used_and_what_failed_gives_back_all(
    tmp_path: Path, status: int | None, tokens: int, requests: int
) -> None:
    async def run() -> None:
        link = Link(tmp_path)
        meter = GatewayMeter(link, None, name="g")
        async with meter.running():
            cut = exchange(status=status, tokens_per_day=100)
            cut.usage = ResponseUsage(prompt_tokens=3)
            await meter.admit(cut, "bundled", 3, 97)
            cut.usage.tokens = tokens
            meter.end(cut)
            meter.end(cut)
        meter = GatewayMeter(link, None, name="g")
        async with meter.running():
            await answered(meter, 1, most=90, tokens_per_day=100)
        counted = await total(link)
        assert (counted.requests, counted.tokens) == (requests + 1, requests * (3 + tokens) + 1)

    asyncio.run(run())


@pytest.mark.parametrize("jump_s", [-86_400.0, 86_400.0, 40 * 365 * 86_400.0])
def test_a_clock_that_jumps_spends_each_day_at_most_once(tmp_path: Path, jump_s: float) -> None:
    async def run() -> None:
        now_s = NOON
        link = Link(tmp_path)
        meter = GatewayMeter(link, None, name="g", unix_clock=lambda: now_s)
        async with meter.running():
            for _ in range(2):
                for now_s in (NOON, NOON + jump_s):  # noqa: B007  # the clock reads it
                    try:
                        await answered(meter, 10, tokens_per_day=10)
                    except ApiError as error:
                        assert (error.status, error.code) == (429, "insufficient_quota")
                        assert error.headers == {"x-should-retry": "false"}
        sums = await link.meter.report(FOREVER, None)
        assert {group.day: counts.tokens for group, counts in sums.items()} == {
            day_of(NOON): 10,
            day_of(NOON + jump_s): 10,
        }

    asyncio.run(run())


def test_a_budget_in_money_without_prices_is_a_503_that_names_the_setting(tmp_path: Path) -> None:
    async def run() -> None:
        meter = GatewayMeter(Link(tmp_path), None, name="g")
        async with meter.running():
            with pytest.raises(ApiError, match="set prices") as refused:
                await answered(meter, 1, money_per_day=1.0)
            assert refused.value.code == "prices_missing"

    asyncio.run(run())


def test_a_row_of_a_batch_counts_once_however_often_it_runs(tmp_path: Path) -> None:
    async def run() -> None:
        losses = iter(["message", "reply", ""])
        link = Link(tmp_path, lambda: next(losses, ""))
        meter = GatewayMeter(link, None, name="batches")
        async with meter.running():
            for used in (4, 4, None, 4):
                row = exchange()
                row.meter_id = "batch-1:row-1"
                row.usage = ResponseUsage(prompt_tokens=1)
                await meter.admit(row, "bundled", 1, 9)
                if used is not None:  # else the engine died, and the row runs again
                    row.usage.tokens = used - 1
                    await meter.count(row)
                meter.forget(row)
        counted = await total(link)
        assert (counted.requests, counted.tokens) == (1, 4)

    asyncio.run(run())


def test_a_row_whose_engine_died_gives_back_what_it_reserved(tmp_path: Path) -> None:
    async def run() -> None:
        meter = GatewayMeter(Link(tmp_path), None, name="batches")
        async with meter.running():
            row = exchange(tokens_per_day=10)
            row.meter_id = "batch-1:row-1"
            for _ in range(3):
                await meter.admit(row, "bundled", 1, 9)
                meter.forget(row)
            await answered(meter, 10, tokens_per_day=10)

    asyncio.run(run())


def test_a_caller_that_leaves_while_it_waits_for_the_meter_holds_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        link = Link(tmp_path, lambda: "reply")
        meter = GatewayMeter(link, None, name="g")
        async with meter.running():
            waiting = asyncio.create_task(answered(meter, 10, tokens_per_day=10))
            while link.calls < 5:
                await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            link.lose = lambda: ""
            await until_granted(meter)
            await answered(meter, 9, most=9, tokens_per_day=10)
        assert (await total(link)).tokens == 10

    asyncio.run(run())


def test_a_refused_request_is_not_sent_again_and_holds_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        link = Link(tmp_path)
        meter = GatewayMeter(link, None, name="g")
        async with meter.running():
            first = exchange(tokens_per_day=10)
            await meter.admit(first, "bundled", 1, 9)

            def end_first() -> str:
                meter.end(first)  # while the second request is on its way, so that another message follows at once
                return ""

            link.lose = end_first
            with pytest.raises(ApiError, match="running requests may use 10 tokens"):
                await meter.admit(exchange(tokens_per_day=10), "bundled", 1, 9)
            await answered(meter, 10, tokens_per_day=10)

    asyncio.run(run())


def limited(id: str, tokens: int, limit: int) -> LimitedRequest:
    limits = {"account:acme": UsageLimits(tokens_per_day=limit)}
    return LimitedRequest(id=id, day=day_of(NOON), tokens=tokens, price_billionths=0, limits=limits)


def test_a_request_that_ended_while_the_ledger_was_read_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    open_ledger = UsageLedger.open

    def slow_open(ledger: UsageLedger) -> None:
        begun.set()
        assert go_on.wait(60)
        open_ledger(ledger)

    async def run() -> None:
        meter = UsageMeter(UsageLedger(tmp_path))
        first = MeterMessage(gateway="g", number=0, requests=[limited("1", 10, limit=10)], recent=[])
        reading = asyncio.create_task(meter.sync(first))
        try:
            assert await asyncio.to_thread(begun.wait, 60)
            await meter.sync(MeterMessage(gateway="g", number=1, ended=["1"]))
        finally:
            go_on.set()
        assert (await reading).answers == {}
        reply = await meter.sync(MeterMessage(gateway="g", number=2, requests=[limited("2", 10, limit=10)]))
        assert isinstance(reply.answers["2"], Granted)

    monkeypatch.setattr(UsageLedger, "open", slow_open)
    asyncio.run(run())


@pytest.mark.parametrize("later_s", [0, 100])
def test_a_record_that_waits_holds_its_budget_although_the_meter_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later_s: int
) -> None:
    async def run() -> None:
        link = Link(tmp_path)
        store = link.record
        away = True

        async def unstored(records: Sequence[UsageRecord]) -> None:
            if away:
                raise UnavailableError("the storage is away")
            await store(records)

        monkeypatch.setattr(link, "record", unstored)
        meter = GatewayMeter(link, None, name="g")
        async with meter.running():
            await answered(meter, 10, tokens_per_day=10)
            later = SimpleNamespace(monotonic=lambda: time.monotonic() + later_s)
            monkeypatch.setattr(gateway_meter, "time", later)
            link.restart()
            with pytest.raises(ApiError, match="running requests may use 10 tokens"):
                await answered(meter, 10, tokens_per_day=10)
            away = False
        assert (await total(link)).tokens == 10

    asyncio.run(run())


def test_a_request_holds_nothing_if_its_record_is_stored_before_its_gateway_introduces_it(tmp_path: Path) -> None:
    async def run() -> None:
        meter = UsageMeter(UsageLedger(tmp_path))
        group = UsageGroup(day_of(NOON), "acme", "ada", "bundled")
        await meter.record([UsageRecord("1", group, UsageCounts(prompt_tokens=1))])
        running = RecentRequest(request=limited("1", 10, limit=10), age_s=0, running=True)
        requests = [limited("2", 9, limit=10)]
        reply = await meter.sync(MeterMessage(gateway="g", number=0, requests=requests, recent=[running]))
        assert isinstance(reply.answers["2"], Granted)

    asyncio.run(run())


def test_reports_delay_no_counting_and_wait_in_no_long_queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    read_rows = LedgerView.rows

    def slow_rows(view: LedgerView, first: str, last: str, account: str | None) -> UsageSums:
        begun.set()
        assert go_on.wait(60)
        return read_rows(view, first, last, account)

    def record(id: str) -> UsageRecord:
        return UsageRecord(id, UsageGroup(day_of(NOON), "acme", "ada", "bundled"), UsageCounts(prompt_tokens=1))

    async def run() -> None:
        meter = UsageMeter(UsageLedger(tmp_path))
        await meter.record([record("first")])
        reports = [asyncio.create_task(meter.report(FOREVER, account)) for account in ("acme", "other")]
        try:
            assert await asyncio.to_thread(begun.wait, 60)
            for account, whose in (("acme", "this account"), ("third", "other accounts"), (None, "other accounts")):
                with pytest.raises(QueueFullError, match=whose) as refused:
                    await meter.report(FOREVER, account)
                assert api_error(refused.value).status == 429
            async with asyncio.timeout(60):
                await meter.record([record("second")])
        finally:
            go_on.set()
        acme, other = await asyncio.gather(*reports)
        assert [counts.requests for counts in acme.values()] == [1], "the copy has what was counted before"
        assert other == {}
        assert [counts.requests for counts in (await meter.report(FOREVER, None)).values()] == [2]

    monkeypatch.setattr(LedgerView, "rows", slow_rows)
    asyncio.run(run())


def test_what_is_added_up_gives_back_its_reservations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_spool, "SPOOL_RECORDS", 2)
    record = UsageMeter.record
    away = True

    async def unstored(meter: UsageMeter, records: Sequence[UsageRecord]) -> None:
        if away:
            raise UnavailableError("the storage is away")
        await record(meter, records)

    async def run() -> None:
        nonlocal away
        meter = GatewayMeter(Link(tmp_path), None, name="g")
        async with meter.running():
            for _ in range(9):
                await answered(meter, 1, tokens_per_day=100)
            away = False
        async with meter.running():
            await answered(meter, 91, most=91, tokens_per_day=100)

    monkeypatch.setattr(UsageMeter, "record", unstored)
    asyncio.run(run())
