"""Callers of an endpoint while something befalls it, and what its controller sees."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.machines import callers
from tests.machines.endpoint import SECONDS, Endpoint
from tests.machines.machines import Machine

REPLICA, ENGINE = "^ray::ServeReplica:mars:Engine", "mars_ray.engine.process.worker"
"""How processes begin to name themselves: see `pgrep -f`."""


@dataclass
class Asked:
    """What callers saw, in seconds from the fault."""

    answers: list[tuple[float, float, str]] = field(default_factory=list)

    @property
    def failed(self) -> list[tuple[float, float, str]]:
        return [each for each in self.answers if each[2] != "200"]

    @property
    def whole_s(self) -> float:
        """When the last request that failed, or took over five seconds, had ended."""
        return max((at_s + took_s for at_s, took_s, status in self.answers if status != "200" or took_s > 5), default=0)

    def __str__(self) -> str:
        slow = [(at_s, took_s) for at_s, took_s, status in self.answers if status == "200" and took_s > 5]
        return f"{len(self.answers)} answers, failed {self.failed}, over 5 s {slow}, whole after {self.whole_s:.0f} s"


@contextmanager
def asking(endpoint: Endpoint, machines: list[Machine], seconds: float) -> Iterator[Asked]:
    """Let callers on the first of some machines ask all of them; the block begins once they are answered."""
    asked = Asked()
    running = endpoint.call(machines[0], [endpoint.url(each) for each in machines], seconds)
    assert running.stdout is not None
    lines = [running.stdout.readline() for _ in range(8)]
    at_s = time.time()
    yield asked
    rest, _ = running.communicate(timeout=SECONDS + seconds)
    found = callers.parsed([*lines, *rest.splitlines()])
    asked.answers = [(round(asked_s - at_s, 1), round(took_s, 1), status) for asked_s, took_s, status in found]


def until(condition: Callable[[], bool]) -> float:
    """Return the seconds until a condition holds."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < SECONDS, "it never held"
        time.sleep(0.2)
    return time.monotonic() - began_s


def seen(endpoint: Endpoint) -> set[str]:
    """Return the replicas that the controller sees."""
    asked = endpoint.nodes[0]
    header = f"Authorization: Bearer {endpoint.key}"
    done = asked.run("curl", "-s", "-m", "5", "-H", header, f"{endpoint.url(asked)}/control", check=False)
    try:
        return {each["replica"] for each in json.loads(done.stdout)["replicas"]}
    except (ValueError, LookupError):
        return set()
