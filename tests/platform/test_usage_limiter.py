"""Limits hold over every minute and day, whatever gateways lose, repeat or leave behind."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.platform.accounts.account_store import UsageLimits
from mars_ray.platform.usage.limiter import (
    SILENT_S,
    Granted,
    LimitedRequest,
    LimitRefusal,
    MinuteWindow,
    RecentRequest,
    UsageLimiter,
)
from tests.factories.clock import Clock

DAY = "2026-11-25"
HOLDER = "key:ada"


@dataclass
class Bench:
    """A limiter, and what holders have spent."""

    clock: Clock = field(default_factory=lambda: Clock(1000.0))
    spent: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    limiter: UsageLimiter = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.limiter = UsageLimiter(self._spent, self.clock)
        self.limiter.introduce("g", [])

    def silence(self) -> None:
        """Let all gateways but `g` be silent until they count as dead."""
        for _ in range(2):
            self.clock.now_s += SILENT_S / 2 + 1
            self.limiter.knows("g")

    def _spent(self, period: str, holder: str) -> Sequence[int]:
        return self.spent.get((period, holder), (0, 0))

    def ask(self, id: str, tokens: int = 1, gateway: str = "g", day: str = DAY, **limits: Any) -> Any:
        return self.limiter.admit(gateway, asked(id, tokens, day=day, **limits))


def asked(id: str, tokens: int = 1, day: str = DAY, money: int = 0, **limits: Any) -> LimitedRequest:
    return LimitedRequest(id=id, day=day, tokens=tokens, price_billionths=money, limits={HOLDER: UsageLimits(**limits)})


def kind_of(answer: Granted | LimitRefusal) -> str:
    return answer.kind if isinstance(answer, LimitRefusal) else "granted"


@dataclass
class Slow:
    """The same rule for one limit, by a look at everything that was ever admitted."""

    admitted: dict[str, list[float]] = field(default_factory=dict)
    """Time and amount by id."""

    def fits(self, now_s: float, amount: int, limit: int) -> bool:
        recent = sum(amount for at_s, amount in self.admitted.values() if math.floor(at_s) >= math.floor(now_s) - 60)
        return recent + amount <= limit

    def most_in_a_minute(self) -> float:
        times = [at_s for at_s, _ in self.admitted.values()]
        return max(
            (sum(a for at_s, a in self.admitted.values() if begin_s <= at_s <= begin_s + 60) for begin_s in times),
            default=0,
        )


steps = st.lists(
    st.tuples(
        st.floats(0, SILENT_S - 1),  # seconds before the step
        st.sampled_from("gh"),  # the gateway
        st.sampled_from(["ask", "ask", "ask", "repeat", "end", "restart"]),
        st.integers(1, 60),  # the most tokens
        st.floats(0, 1),  # the share of them that is used
    ),
    max_size=40,
)


@settings(max_examples=300)
@given(steps, st.integers(1, 100), st.integers(1, 6))
def test_no_minute_has_more_than_the_limits_through_lost_replies_and_restarts(
    given: list[tuple[float, str, str, int, float]], tokens_limit: int, requests_limit: int
) -> None:
    bench = Bench()
    limits: dict[str, Any] = {"tokens_per_minute": tokens_limit, "requests_per_minute": requests_limit}
    slow = {"tokens": Slow(), "requests": Slow()}
    running: dict[str, LimitedRequest] = {}
    known: dict[str, dict[str, tuple[float, LimitedRequest]]] = {"g": {}, "h": {}}
    bench.limiter.introduce("h", [])
    for number, (seconds, gateway, step, tokens, used) in enumerate(given):
        bench.clock.now_s += seconds
        now_s = bench.clock.now_s
        for name in "gh":
            bench.limiter.knows(name)
        if step == "ask":
            request = asked(str(number), tokens, **limits)
            answer = bench.limiter.admit(gateway, request)
            fits = (
                tokens <= tokens_limit
                and slow["tokens"].fits(now_s, tokens, tokens_limit)
                and slow["requests"].fits(now_s, 1, requests_limit)
            )
            assert isinstance(answer, Granted) == fits, answer
            if fits:
                running[request.id] = request
                known[gateway][request.id] = (now_s, request)
                slow["tokens"].admitted[request.id] = [now_s, tokens]
                slow["requests"].admitted[request.id] = [now_s, 1]
        elif step == "repeat" and running:
            repeated = list(running.values())[-1]
            assert isinstance(bench.limiter.admit(gateway, repeated), Granted)
        elif step == "end" and running:
            id, ended = running.popitem()
            amount = int(used * ended.tokens)
            for _ in range(2):  # the first reply was lost
                bench.limiter.settle(id, amount)
            slow["tokens"].admitted[id][1] = amount
            for requests in known.values():
                if id in requests:
                    requests[id] = (requests[id][0], asked(id, amount, **limits))
        elif step == "restart":
            bench.limiter = UsageLimiter(bench._spent, bench.clock)
            for name, requests in known.items():
                recent = [
                    RecentRequest(request=request, age_s=now_s - at_s, running=id in running)
                    for id, (at_s, request) in requests.items()
                    if now_s - at_s <= 61 or id in running
                ]
                for _ in range(2):
                    bench.limiter.introduce(name, recent)
    assert slow["tokens"].most_in_a_minute() <= tokens_limit
    assert slow["requests"].most_in_a_minute() <= requests_limit


budget_steps = st.lists(
    st.tuples(
        st.sampled_from(["ask", "end", "cut"]),
        st.integers(1, 60),
        st.floats(0, 1),
        st.sampled_from([DAY, "2026-11-26"]),
    ),
    max_size=40,
)


@given(budget_steps, st.integers(1, 200), st.integers(1, 300))
def test_no_day_and_no_month_spends_more_than_its_budget(
    given: list[tuple[str, int, float, str]], day_limit: int, month_limit: int
) -> None:
    bench = Bench()
    running: dict[str, LimitedRequest] = {}
    for number, (step, tokens, used, day) in enumerate(given):
        if step == "ask":
            request = asked(str(number), tokens, day, tokens_per_day=day_limit, tokens_per_month=month_limit)
            spent, month = (
                sum(r.tokens for r in running.values() if r.day == day),
                sum(r.tokens for r in running.values()),
            )
            spent += bench.spent.get((day, HOLDER), [0])[0]
            month += bench.spent.get((day[:7], HOLDER), [0])[0]
            fits = spent + tokens <= day_limit and month + tokens <= month_limit
            answer = bench.limiter.admit("g", request)
            assert isinstance(answer, Granted) == fits
            if fits:
                running[request.id] = request
        elif running:
            id, ended = running.popitem()
            amount = int(used * ended.tokens) if step == "end" else 0
            for period in (ended.day, ended.day[:7]):
                bench.spent.setdefault((period, HOLDER), [0, 0])[0] += amount
            bench.limiter.settle(id, amount)
    for (period, _), (tokens, _) in bench.spent.items():
        assert tokens <= (day_limit if len(period) == 10 else month_limit)


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=20), st.integers(1, 100), st.integers(1, 100))
def test_after_the_wait_that_is_told_the_amount_fits(given: list[tuple[float, int]], amount: int, limit: int) -> None:
    window, now_s = MinuteWindow(), 5.0
    for seconds, held in given:
        now_s += seconds
        window.add(math.floor(now_s), held)
    window.expire(now_s)
    wait_s = window.wait_s(now_s, amount, max(amount, limit))
    window.expire(now_s + wait_s + 1e-6)
    assert window.total + amount <= max(amount, limit)
    window.expire(now_s + window.reset_s(now_s) + 1e-6)


def test_a_refusal_tells_when_the_next_request_fits_and_it_then_does() -> None:
    bench = Bench()
    assert kind_of(bench.ask("1", requests_per_minute=1)) == "granted"
    refused = bench.ask("2", requests_per_minute=1)
    assert (kind_of(refused), refused.retry_after_s) == ("requests", 61)
    bench.clock.now_s += refused.retry_after_s - 0.01
    assert kind_of(bench.ask("2", requests_per_minute=1)) == "requests"
    bench.clock.now_s += 0.01
    assert kind_of(bench.ask("2", requests_per_minute=1)) == "granted"


def test_what_a_request_did_not_use_is_given_back_at_once() -> None:
    bench = Bench()
    assert kind_of(bench.ask("1", 90, tokens_per_minute=100)) == "granted"
    assert kind_of(bench.ask("2", 90, tokens_per_minute=100)) == "tokens"
    bench.limiter.settle("1", 10)
    granted = bench.ask("2", 90, tokens_per_minute=100)
    assert granted.tokens.remaining == 0


@pytest.mark.parametrize("limits", [{"tokens_per_minute": 10}, {"tokens_per_day": 10}, {"tokens_per_month": 10}])
def test_a_request_larger_than_a_whole_limit_is_told_so_and_given_no_time_to_wait(limits: dict[str, Any]) -> None:
    refused = Bench().ask("1", 11, **limits)
    assert (kind_of(refused), refused.retry_after_s) == ("too_large", 0)
    assert "11 tokens" in refused.message and "10 tokens" in refused.message and "key 'ada'" in refused.message


def test_a_budget_that_running_requests_hold_is_worth_a_retry_and_a_spent_one_is_not() -> None:
    bench = Bench()
    assert kind_of(bench.ask("1", 8, tokens_per_day=10)) == "granted"
    assert kind_of(bench.ask("2", 8, tokens_per_day=10)) == "reserved"
    bench.spent[DAY, HOLDER] = [8, 0]
    bench.limiter.settle("1", 8)
    assert kind_of(bench.ask("2", 8, tokens_per_day=10)) == "budget"
    assert kind_of(bench.ask("3", 8, day="2026-11-26", tokens_per_day=10)) == "granted"


def test_money_counts_towards_its_budget_in_billionths() -> None:
    bench = Bench()
    limits = {HOLDER: UsageLimits(money_per_month=0.5)}
    request = LimitedRequest(id="1", day=DAY, tokens=1, price_billionths=300_000_000, limits=limits)
    assert kind_of(bench.limiter.admit("g", request)) == "granted"
    bench.spent["2026-11", HOLDER] = [1, 300_000_000]
    bench.limiter.settle("1", 1)
    other = LimitedRequest(id="2", day=DAY, tokens=1, price_billionths=300_000_000, limits=limits)
    refused = bench.limiter.admit("g", other)
    assert isinstance(refused, LimitRefusal) and refused.kind == "budget"
    assert "money_per_month of the key 'ada' is 0.5 of money; 0.2 of money are left" in refused.message


def test_a_limit_that_changes_while_requests_run_holds_from_the_next_request_on() -> None:
    bench = Bench()
    assert kind_of(bench.ask("1", 50, tokens_per_minute=100)) == "granted"
    assert kind_of(bench.ask("2", 30, tokens_per_minute=60)) == "tokens"
    assert kind_of(bench.ask("3", 30, tokens_per_minute=10**15)) == "granted"
    assert kind_of(bench.ask("4", 30)) == "granted"


def test_the_requests_of_a_gateway_that_died_give_back_what_they_held() -> None:
    bench = Bench()
    bench.limiter.introduce("dead", [])
    assert kind_of(bench.ask("1", 10, "dead", tokens_per_day=10)) == "granted"
    assert kind_of(bench.ask("2", 10, tokens_per_day=10)) == "reserved"
    bench.silence()
    assert kind_of(bench.ask("2", 10, tokens_per_day=10)) == "granted"


def test_the_requests_of_a_gateway_that_was_only_silent_hold_their_budgets_again() -> None:
    bench = Bench()
    bench.limiter.introduce("silent", [])
    assert kind_of(bench.ask("1", 10, "silent", tokens_per_day=10)) == "granted"
    bench.silence()
    assert kind_of(bench.ask("2", 10, tokens_per_day=10)) == "granted"
    bench.limiter.settle("2", 0)
    assert not bench.limiter.knows("silent")
    running = RecentRequest(request=asked("1", 10, tokens_per_day=10), age_s=SILENT_S + 2, running=True)
    bench.limiter.introduce("silent", [running])
    assert bench.limiter.knows("silent")
    assert kind_of(bench.ask("3", 10, tokens_per_day=10)) == "reserved"
    bench.limiter.settle("1", 0)
    assert kind_of(bench.ask("3", 10, tokens_per_day=10)) == "granted"


def test_the_requests_of_a_silent_gateway_count_once_in_their_minute() -> None:
    bench = Bench()
    bench.limiter.introduce("silent", [])
    limits: dict[str, Any] = {"tokens_per_minute": 20, "requests_per_minute": 3}
    assert kind_of(bench.ask("1", 10, "silent", **limits)) == "granted"
    bench.silence()
    assert kind_of(bench.ask("2", 11, **limits)) == "tokens"
    running = RecentRequest(request=asked("1", 10, **limits), age_s=SILENT_S + 2, running=True)
    bench.limiter.introduce("silent", [running])
    granted = bench.ask("2", 10, **limits)
    assert (granted.requests.remaining, granted.tokens.remaining) == (1, 0)


def test_a_request_that_another_process_runs_again_keeps_what_it_holds() -> None:
    bench = Bench()
    bench.limiter.introduce("dead", [])
    assert kind_of(bench.ask("1", 10, "dead", tokens_per_day=10)) == "granted"
    bench.clock.now_s += SILENT_S - 5
    bench.limiter.knows("g")
    assert kind_of(bench.ask("1", 10, tokens_per_day=10)) == "granted"
    bench.clock.now_s += 10
    bench.limiter.knows("g")
    assert kind_of(bench.ask("2", 10, tokens_per_day=10)) == "reserved"


def test_an_account_holds_all_its_keys_together() -> None:
    bench = Bench()
    account = UsageLimits(requests_per_minute=1)
    for key, answer in (("a", "granted"), ("b", "requests")):
        limits = {f"key:{key}": UsageLimits(requests_per_minute=5), "account:acme": account}
        request = LimitedRequest(id=key, day=DAY, tokens=1, price_billionths=0, limits=limits)
        assert kind_of(decided := bench.limiter.admit("g", request)) == answer
    assert isinstance(decided, LimitRefusal) and "the account 'acme'" in decided.message
