"""A batch job on workers that are not there, run against its deadline: what was estimated of them need not be so."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

from mars_ray.control.cluster_load import Backlog
from mars_ray.control.control_settings import ControlPlan
from mars_ray.control.core.controller import Controller
from mars_ray.control.core.lease import Lease
from mars_ray.control.replica_speed import ReplicaSpeed
from mars_ray.engine.service_class import ServiceClass
from mars_ray.engine.stats.state import EngineState
from mars_ray.engine.stats.step_time import StepTime
from tests.control.control_samples import SPEED, class_state, engine_state, plan_of

CEILING, FLOOR = 0.95, 0.5
DEADLINE_S = 300
TELL_S = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """How a job really is, against the first estimates: factors of 1 where those are right."""

    need: float
    """Share of the time until the deadline that it takes at the ceiling, if the estimates are right."""
    speed: float = 1.0
    length: float = 1.0
    drift: float = 1.0
    """Times as fast from the middle of the time on."""
    even: bool = False
    """All rows have one length."""
    workers: int = 2
    row_tokens: float = 200.0
    """Mean length, as estimated."""
    paused_s: tuple[int, int] = (0, 0)
    """The driver yields from here to there."""
    seed: int = 0


@dataclass(slots=True, kw_only=True)
class Run:
    """What came of it, second by second."""

    thresholds: list[float] = field(default_factory=list)
    """The mean of the workers."""
    late_s: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the time until the deadline."""
        return len(self.thresholds) / DEADLINE_S

    @property
    def changes(self) -> int:
        return sum(before != after for before, after in zip(self.thresholds, self.thresholds[1:], strict=False))


class Pool:
    """Rows that no worker has taken yet."""

    def __init__(self, truth: Truth) -> None:
        self._random, self._even, self._mean = random.Random(truth.seed), truth.even, truth.row_tokens * truth.length
        believed_s = truth.workers * SPEED.max_tokens_s(CEILING) / truth.speed
        self.rows = self.left = round(truth.need * DEADLINE_S * believed_s / truth.row_tokens)

    def take(self) -> float | None:
        """Return the tokens of the next row; None when there is none."""
        if not self.left:
            return None
        self.left -= 1
        return self._mean if self._even else self._random.uniform(1, 2 * self._mean)


class Worker:
    """Runs rows at the speed of its threshold, a few at a time, and reports step times that are off by a factor."""

    def __init__(self, name: str, truth: Truth, pool: Pool, plan: ControlPlan) -> None:
        self._pool, self._model = pool, slowed(SPEED, truth.speed)
        self._now_s, self._threshold = 0.0, CEILING
        self._lease = Lease(name, plan, lambda: self._now_s)
        self._running: list[tuple[float, float]] = []
        """Of each row, all its tokens and those that are left."""
        self.ended, self.tokens = 0, 0.0

    @property
    def running(self) -> int:
        return len(self._running)

    def beat(self, controller: Controller) -> float:
        """Report, follow the answer, and return the threshold."""
        report = self._lease.report(self._state())
        self._lease.take(controller.handle_report(report))
        self._threshold = self._lease.in_force(report).thresholds["standard"]
        return self._threshold

    def second(self, factor: float) -> None:
        """Generate for a second, `factor` times as fast as usual; a row that ends makes room for the next at once."""
        self._now_s += 1
        left_s = 1.0
        while left_s > 0:
            self._fill()
            if not self._running:
                return
            pace = factor * float(SPEED.rates(self._threshold)[self.running - 1]) / self.running
            step_s = min(left_s, min(left for _, left in self._running) / pace)
            left_s -= step_s
            after = [(tokens, left - pace * step_s) for tokens, left in self._running]
            self._running = [row for row in after if row[1] > 1e-6]
            self.ended += len(after) - self.running
            self.tokens += sum(tokens for tokens, left in after if left <= 1e-6)

    def _fill(self) -> None:
        held = self._lease.directive
        while self.running < SPEED.rows and not (held and held.paused) and (tokens := self._pool.take()):
            self._running.append((tokens, tokens))

    def _state(self) -> EngineState:
        counts: dict[str, Any] = {
            "arrived": self.ended + self.running,
            "ended": self.ended,
            "tokens": round(self.tokens),
        }
        standard = class_state(threshold=self._threshold, running=self.running, **counts)
        return engine_state(standard, max_num_seqs=SPEED.rows, step_time=self._model.step_time)


def slowed(speed: ReplicaSpeed, factor: float) -> ReplicaSpeed:
    """Return a model that takes so many times as long for each step."""
    times = {name: getattr(speed.step_time, name) * factor for name in StepTime.__dataclass_fields__}
    return replace(speed, step_time=StepTime(**times))


def run_job(truth: Truth) -> Run:
    """Run a job to its end, or to three times its time."""
    plan = plan_of(ServiceClass(floor=FLOOR), ceiling=CEILING, policy="deadline", recover_s=DEADLINE_S / 50)
    now_s, pool, run = 0, Pool(truth), Run()
    controller = Controller(plan, clock=lambda: float(now_s))
    workers = [Worker(f"w{number}", truth, pool, plan) for number in range(truth.workers)]
    while now_s < 3 * DEADLINE_S and (pool.left or not now_s or any(each.running for each in workers)):
        if now_s % TELL_S == 0:
            ended = sum(each.ended for each in workers)
            mean = sum(each.tokens for each in workers) / ended if ended else truth.row_tokens
            backlog = Backlog(tokens=(pool.rows - ended) * mean, seconds=DEADLINE_S - now_s)
            controller.update_backlog(backlog, paused=truth.paused_s[0] <= now_s < truth.paused_s[1])
        run.thresholds.append(sum(each.beat(controller) for each in workers) / len(workers))
        job = controller.job()
        assert job is not None
        run.late_s.append(job.late_s)
        for each in workers:
            each.second(truth.drift if now_s >= DEADLINE_S / 2 else 1.0)
        run.running.append(sum(each.running for each in workers))
        now_s += 1
    return run
