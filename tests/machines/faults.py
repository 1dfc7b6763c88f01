"""Callers of an endpoint while something befalls it, what its controller sees, and what befalls machines."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.machines import callers
from tests.machines.endpoint import SECONDS, Endpoint
from tests.machines.machines import WORK, Machine

REPLICA, ENGINE = "^ray::ServeReplica:mars:Engine", "mars-ray-engine"
CONTROLLER = "^ray::ControllerActor"
"""How processes begin to name themselves: see `pgrep -f`, and `pgrep` for engines."""
DUTY = "while [ -e slow ]; do kill -s STOP -- -1; sleep 0.05; kill -s CONT -- -1; sleep 0.05; done"


@dataclass
class Asked:
    """What callers saw, in seconds from the fault."""

    at_s: float = 0.0
    """When it was, as `time.time` has it; when the block began, by default."""
    answers: list[tuple[float, float, str]] = field(default_factory=list)
    longest_pause_s: float = 0.0
    """Longest pause between two events of a whole stream."""

    @property
    def failed(self) -> list[tuple[float, float, str]]:
        return [each for each in self.answers if each[2] != "200"]

    @property
    def broken(self) -> list[str]:
        """How streams ended that a gateway should have continued."""
        return [status for _, _, status in self.answers if status.startswith("event") or status == "differs"]

    @property
    def whole_s(self) -> float:
        """When the last request that failed, or took over five seconds, had ended."""
        return max((at_s + took_s for at_s, took_s, status in self.answers if status != "200" or took_s > 5), default=0)

    def __str__(self) -> str:
        slow = [(at_s, took_s) for at_s, took_s, status in self.answers if status == "200" and took_s > 5]
        return f"{len(self.answers)} answers, failed {self.failed}, over 5 s {slow}, whole after {self.whole_s:.0f} s"


@contextmanager
def asking(endpoint: Endpoint, machines: list[Machine], seconds: float, *more: str) -> Iterator[Asked]:
    """Let callers on the first of some machines ask all of them; the block begins once they are answered."""
    asked = Asked()
    running = endpoint.call(machines[0], [endpoint.url(each) for each in machines], seconds, *more)
    assert running.stdout is not None
    lines = [running.stdout.readline() for _ in range(8)]
    reader = threading.Thread(target=lines.extend, args=[running.stdout])  # or callers wait to print
    reader.start()
    asked.at_s = time.time()
    yield asked
    reader.join(timeout=SECONDS + seconds)
    found = callers.parsed(lines)
    asked.answers = [(round(asked_s - asked.at_s, 1), round(took_s, 1), status) for asked_s, took_s, status, _ in found]
    asked.longest_pause_s = max((pause_s for _, _, status, pause_s in found if status == "200"), default=0.0)


def until(condition: Callable[[], bool]) -> float:
    """Return the seconds until a condition holds."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < SECONDS, "it never held"
        time.sleep(0.2)
    return time.monotonic() - began_s


def told(endpoint: Endpoint, path: str, *more: str, machine: Machine | None = None) -> str:
    """Return what the endpoint says to an operator, asked on a machine; nothing where it does not answer."""
    asked = machine or endpoint.nodes[0]
    header = f"Authorization: Bearer {endpoint.key}"
    words = "curl", "-s", "-f", "-m", "5", "-H", header, *more, f"{endpoint.url(asked)}{path}"
    return asked.run(*words, check=False).stdout


def seen(endpoint: Endpoint, machine: Machine | None = None) -> set[str]:
    """Return the replicas that the controller sees."""
    said = told(endpoint, "/control", machine=machine)
    return {each["replica"] for each in json.loads(said)["replicas"]} if said else set()


def thresholds(endpoint: Endpoint, machine: Machine) -> dict[str, float]:
    """Return the threshold in force in each engine that answers."""
    found = re.findall(
        r'^mars:threshold\{.*replica="(\w+)".*\} (.+)$', told(endpoint, "/metrics", machine=machine), re.M
    )
    return {replica: float(threshold) for replica, threshold in found}


def kill_ray(machine: Machine) -> None:
    """kill -9 all that Ray started on a machine."""
    machine.run("pkill", "-9", "-f", "ray", check=False)


@contextmanager
def half_speed(machine: Machine) -> Iterator[None]:
    """Let all that is on a machine stand still for half of the time; nothing can be started there meanwhile."""
    slow = Path(f"/proc/{machine.init}/root{WORK}/slow")
    slow.touch()
    slowing = machine.start("sh", "-c", DUTY)
    try:
        yield
    finally:
        slow.unlink()
        slowing.wait()


@contextmanager
def full_disk(machine: Machine) -> Iterator[None]:
    """Leave no byte free on the disk of a machine."""
    machine.run("sh", "-c", "cat /dev/zero > filler 2>&1", check=False)
    try:
        yield
    finally:
        machine.run("rm", "filler")
