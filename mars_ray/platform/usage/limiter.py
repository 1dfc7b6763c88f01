"""Limits per minute and budgets, over the requests of all gateways.

In:    requests before they run, with the most that they may use; what they have used; a clock that never goes back.
Out:   a grant, or a refusal that says when to try again.
Never: grants more than a limit in any minute, day or month, counting each running request with the most it may use.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Literal

from mars_ray.platform.accounts.account_store import UsageLimits
from mars_ray.platform.usage.usage_rows import BILLIONTHS, month_of

SILENT_S = 30.0
"""Seconds after which a gateway that says nothing counts as dead, and its running requests no longer hold budgets."""
FORGET_S = 300.0
"""Seconds after which a silent gateway is forgotten."""
WINDOW_S = 60
"""Length of the window in seconds. An amount leaves it up to a second later, because slots are whole seconds."""

RefusalKind = Literal["requests", "tokens", "budget", "reserved", "too_large"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitedRequest:
    """A request whose key or account has limits."""

    id: str
    day: str
    """Day in UTC on which the request arrived. The request counts towards the budgets of this day and its month."""
    tokens: int
    """Prompt tokens and the largest number of answered tokens; once the request has ended, the tokens it used."""
    price_billionths: int
    """The highest price that the request may have."""
    limits: Mapping[str, UsageLimits]
    """Limits by holder: `key:NAME` and `account:NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentRequest:
    """A request that a gateway admitted in the last minute or that still runs. The gateway tells a restarted meter
    about it, and one that has not heard the gateway for `SILENT_S` seconds."""

    request: LimitedRequest
    age_s: float
    """Seconds since its admission."""
    running: bool
    """Whether it holds quota, because it runs or because its record is not stored yet."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """Remaining amount of a limit per minute, for the headers of an answer."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until all of the limit is available, if no other request arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """A request may run. The allowances are the tightest of all holders; None means no limit."""

    requests: Allowance | None = None
    tokens: Allowance | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRefusal:
    """A request may not run."""

    kind: RefusalKind
    limit: str
    """Name of the limit, a field of `UsageLimits`."""
    message: str
    retry_after_s: float = 0.0
    """Seconds until a retry may succeed; 0 if no retry of this request can succeed today."""
    left: Granted = Granted()


class MinuteWindow:
    """A sliding window of one minute. Times are seconds of a clock that never goes back.

    In any 60 seconds, no more is admitted than the limit, if each amount is added only while it fits.
    """

    def __init__(self) -> None:
        self._amounts = Counter[int]()
        """Amounts by the second of their admission."""

    @property
    def total(self) -> int:
        """Sum of the amounts in the window at the last call of `expire`."""
        return self._amounts.total()

    def expire(self, now_s: float) -> None:
        """Drop the amounts that have left the window."""
        for second in [second for second in self._amounts if math.floor(now_s) - second > WINDOW_S]:
            del self._amounts[second]

    def add(self, second: int, amount: int) -> None:
        """Add an amount that was admitted in `second`."""
        self._amounts[second] += amount

    def give_back(self, second: int, amount: int) -> None:
        """Take back a part of what was added in `second`. Does nothing once that second has left the window."""
        if second in self._amounts:
            self._amounts[second] -= amount

    def wait_s(self, now_s: float, amount: int, limit: int) -> float:
        """Return the seconds until `amount` fits below `limit`, if nothing else is admitted until then."""
        excess = self.total + amount - limit
        if excess <= 0:
            return 0.0
        for second in sorted(self._amounts):
            excess -= self._amounts[second]
            if excess <= 0:
                return max(0.0, second + WINDOW_S + 1 - now_s)
        return float(WINDOW_S)

    def reset_s(self, now_s: float) -> float:
        """Return the seconds until the window is empty, if nothing else is admitted until then."""
        newest = max((second for second, amount in self._amounts.items() if amount > 0), default=-math.inf)
        return max(0.0, newest + WINDOW_S + 1 - now_s)


@dataclass(slots=True)
class _Reservation:
    gateway: str
    request: LimitedRequest
    second: int


@dataclass(slots=True)
class _Windows:
    requests: MinuteWindow
    tokens: MinuteWindow


@dataclass(frozen=True, slots=True)
class _Budget:
    name: str
    limit: int
    amount: int
    period: str
    measure: int
    """Index of the measure: 0 for tokens, 1 for billionths of money."""


Spent = Callable[[str, str], Sequence[int]]
"""Returns the tokens and the billionths of money that a holder has spent in a day or month: `spent(period, holder)`."""


class UsageLimiter:
    """The limiter of all gateways. Use it in one thread."""

    def __init__(self, spent: Spent, clock: Callable[[], float]) -> None:
        self._spent = spent
        self._clock = clock
        self._windows: dict[str, _Windows] = {}
        self._running: dict[str, _Reservation] = {}
        self._reserved: dict[tuple[str, str], tuple[int, int]] = {}
        """Tokens and billionths of money that running requests may use, by period and holder."""
        self._heard_s: dict[str, float] = {}
        self._swept_s = clock()

    def knows(self, gateway: str) -> bool:
        """Return whether the gateway has introduced itself and was not silent since, and note that it is alive."""
        known = self._clock() - self._heard_s.get(gateway, -math.inf) <= SILENT_S
        if known:
            self._heard_s[gateway] = self._clock()
        return known

    def introduce(self, gateway: str, recent: Iterable[RecentRequest]) -> None:
        """Take over the requests that a gateway admitted before this limiter began, and those that still run although
        the gateway was silent. Known gateways are ignored."""
        if self.knows(gateway):
            return
        # The windows still have what a silent gateway admitted, so add it at a second that has left them.
        youngest_s = WINDOW_S + 1 if gateway in self._heard_s else 0.0
        now_s = self._heard_s[gateway] = self._clock()
        for admitted in recent:
            if admitted.request.id not in self._running:
                second = math.floor(now_s - max(youngest_s, admitted.age_s))
                self._add(_Reservation(gateway, admitted.request, second), running=admitted.running)

    def admit(self, gateway: str, request: LimitedRequest) -> Granted | LimitRefusal:
        """Reserve the most that a request may use. A running request keeps its reservation, now of this gateway."""
        now_s = self._clock()
        self._sweep(now_s)
        if request.id not in self._running:
            for holder, limits in request.limits.items():
                if refusal := self._refusal(holder, limits, request, now_s):
                    return replace(refusal, left=self._left(request, now_s))
            self._add(_Reservation(gateway, request, math.floor(now_s)), running=True)
        else:
            self._running[request.id].gateway = gateway  # a row that another process runs again
        return self._left(request, now_s)

    def settle(self, id: str, tokens: int) -> None:
        """End the reservation of a request that used `tokens`, and give back the rest. Unknown ids are ignored."""
        if (reservation := self._running.pop(id, None)) is None:
            return
        request = reservation.request
        for holder in request.limits:
            self._window(holder).tokens.give_back(reservation.second, request.tokens - tokens)
        self._reserve(request, -1)

    def _add(self, reservation: _Reservation, *, running: bool) -> None:
        request = reservation.request
        for holder in request.limits:
            windows = self._window(holder)
            windows.requests.add(reservation.second, 1)
            windows.tokens.add(reservation.second, request.tokens)
        if running:
            self._running[request.id] = reservation
            self._reserve(request, 1)

    def _reserve(self, request: LimitedRequest, sign: int) -> None:
        """Reserve the most that a request may use in the budgets of its holders; with `sign` -1, free it."""
        for budget in product((request.day, month_of(request.day)), request.limits):
            tokens, money = self._reserved.pop(budget, (0, 0))
            reserved = (tokens + sign * request.tokens, money + sign * request.price_billionths)
            if any(reserved):
                self._reserved[budget] = reserved

    def _window(self, holder: str) -> _Windows:
        windows = self._windows.setdefault(holder, _Windows(MinuteWindow(), MinuteWindow()))
        for window in (windows.requests, windows.tokens):
            window.expire(self._clock())
        return windows

    def _refusal(self, holder: str, limits: UsageLimits, request: LimitedRequest, now_s: float) -> LimitRefusal | None:
        budgets = list(_budgets(limits, request))
        rate = limits.tokens_per_minute
        sizes = [(budget.name, budget.limit, budget.amount) for budget in budgets]
        for name, limit, amount in [("tokens_per_minute", rate or request.tokens, request.tokens), *sizes]:
            if amount > limit:
                return LimitRefusal(
                    kind="too_large",
                    limit=name,
                    message=f"The request may use {_shown(name, amount)}, and {name} of {_named(holder)} is "
                    f"{_shown(name, limit)}, so that it can never run. Shorten the prompt or lower max_tokens.",
                )
        for budget in budgets:
            if refusal := self._over_budget(holder, budget):
                return refusal
        windows = self._window(holder)
        if limits.requests_per_minute and (wait_s := windows.requests.wait_s(now_s, 1, limits.requests_per_minute)):
            message = f"requests_per_minute of {_named(holder)} is {limits.requests_per_minute}, which is used up."
            return LimitRefusal(kind="requests", limit="requests_per_minute", message=message, retry_after_s=wait_s)
        if rate and (wait_s := windows.tokens.wait_s(now_s, request.tokens, rate)):
            message = (
                f"tokens_per_minute of {_named(holder)} is {rate}; {windows.tokens.total} are used, and the request "
                f"may use {request.tokens}."
            )
            return LimitRefusal(kind="tokens", limit="tokens_per_minute", message=message, retry_after_s=wait_s)
        return None

    def _over_budget(self, holder: str, budget: _Budget) -> LimitRefusal | None:
        spent = self._spent(budget.period, holder)[budget.measure]
        reserved = self._reserved.get((budget.period, holder), (0, 0))[budget.measure]
        if spent + reserved + budget.amount <= budget.limit:
            return None
        left = _shown(budget.name, max(0, budget.limit - spent))
        message = f"{budget.name} of {_named(holder)} is {_shown(budget.name, budget.limit)}; {left} are left"
        if spent + budget.amount <= budget.limit:
            message += f", of which running requests may use {_shown(budget.name, reserved)}."
            return LimitRefusal(kind="reserved", limit=budget.name, message=message, retry_after_s=1.0)
        message += f", and the request may use {_shown(budget.name, budget.amount)}."
        return LimitRefusal(kind="budget", limit=budget.name, message=message)

    def _left(self, request: LimitedRequest, now_s: float) -> Granted:
        """Return the tightest allowances of the holders of a request."""
        requests: list[Allowance] = []
        tokens: list[Allowance] = []
        for holder, limits in request.limits.items():
            windows = self._window(holder)
            for allowances, limit, window in (
                (requests, limits.requests_per_minute, windows.requests),
                (tokens, limits.tokens_per_minute, windows.tokens),
            ):
                if limit is not None:
                    allowances.append(Allowance(limit, max(0, limit - window.total), window.reset_s(now_s)))
        remaining = attrgetter("remaining")
        return Granted(
            requests=min(requests, key=remaining, default=None), tokens=min(tokens, key=remaining, default=None)
        )

    def _sweep(self, now_s: float) -> None:
        """End the reservations of silent gateways and drop empty windows, at most once a second."""
        if now_s - self._swept_s < 1:
            return
        self._swept_s = now_s
        silent = {name for name, heard_s in self._heard_s.items() if now_s - heard_s > SILENT_S}
        if silent:
            for id, held in [(id, held) for id, held in self._running.items() if held.gateway in silent]:
                self.settle(id, held.request.tokens)  # the windows keep all of it, because it may still run
            self._heard_s = {name: s for name, s in self._heard_s.items() if now_s - s <= FORGET_S}
        for holder in list(self._windows):
            windows = self._window(holder)
            if not windows.requests.total and not windows.tokens.total:
                del self._windows[holder]


def _budgets(limits: UsageLimits, request: LimitedRequest) -> Iterator[_Budget]:
    measures = (("tokens", 1, request.tokens), ("money", BILLIONTHS, request.price_billionths))
    for index, (kind, unit, amount) in enumerate(measures):
        for span, period in (("day", request.day), ("month", month_of(request.day))):
            name = f"{kind}_per_{span}"
            if (limit := getattr(limits, name)) is not None:
                yield _Budget(name, round(limit * unit), amount, period, index)


def _shown(name: str, amount: int) -> str:
    return f"{amount / BILLIONTHS:.6g} of money" if name.startswith("money") else f"{amount} tokens"


def _named(holder: str) -> str:
    kind, _, name = holder.partition(":")
    return f"the {kind} {name!r}"
