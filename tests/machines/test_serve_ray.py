"""`mars-ray serve` on several machines: fronts and engines on all, and what callers see when one is lost."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.machines import callers
from tests.machines.machines import Machine

pytestmark = [pytest.mark.ray, pytest.mark.slow]
PORT, SECONDS = 8000, 150


@dataclass
class Endpoint:
    """A running endpoint."""

    nodes: list[Machine]
    key: str

    def url(self, machine: Machine) -> str:
        return f"http://{machine.address}:{PORT}"

    def call(self, machine: Machine, urls: list[str], seconds: float) -> "subprocess.Popen[str]":
        """Let callers on a machine ask; what they print is `callers.parsed`."""
        program = Path(callers.__file__)
        words = ["--key", self.key, "--seconds", str(seconds)]
        return machine.start(sys.executable, program, *urls, *words, stdout=subprocess.PIPE)

    def status(self) -> str:
        """What an operator sees."""
        done = self.nodes[0].run(
            "mars-ray", "status", "--once", "--url", self.url(self.nodes[0]), "--api-key", self.key
        )
        return done.stdout


@pytest.fixture(scope="module")
def endpoint(nodes: list[Machine]) -> Iterator[Endpoint]:
    head = nodes[0]
    key = head.run(
        "mars-ray", "keys", "add", "--file", "keys.yaml", "--name", "ann", "--role", "operate"
    ).stdout.split()[-1]
    keys = head.run("cat", "keys.yaml").stdout
    for each in nodes[1:]:
        each.write("keys.yaml", keys)
    soon = {"health_check_period_s": 1, "health_check_timeout_s": 3}
    config = {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": PORT},
        "applications": [
            {
                "name": "mars",
                "route_prefix": "/",
                "import_path": "mars_ray.ray_serve:build_openai_app",
                "args": {
                    "keys": "/tmp/work/keys.yaml",
                    "allowed_hosts": [each.address for each in nodes],
                    "engine": {"compiled": False},
                },
                "deployments": [
                    {"name": "Gateway", "num_replicas": 3, "max_replicas_per_node": 1, **soon},
                    {
                        "name": "Engine",
                        "num_replicas": 2,
                        "max_replicas_per_node": 1,
                        "ray_actor_options": {"num_cpus": 1},
                        **soon,
                    },
                ],
            }
        ],
    }
    head.write("serve.yaml", yaml.safe_dump(config))
    served = head.start("mars-ray", "serve", "--config", "serve.yaml", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert served.stdout is not None
    said = []
    for line in served.stdout:
        said.append(line)
        if line.startswith("ready"):
            break
    assert said[-1].startswith("ready"), "".join(said)
    yield Endpoint(nodes, key)


def test_every_machine_answers_and_the_controller_sees_all_engines(endpoint: Endpoint) -> None:
    asked = endpoint.call(endpoint.nodes[1], [endpoint.url(each) for each in endpoint.nodes], 5)
    lines, _ = asked.communicate(timeout=SECONDS)
    assert {status for _, _, status in callers.parsed(lines.splitlines())} == {"200"}, lines
    assert "2 replicas" in endpoint.status()


def lose_power(machine: Machine) -> None:
    machine.power_off()


def be_cut_off(machine: Machine) -> None:
    machine.cut_off()
    time.sleep(30)
    machine.put_back()


@pytest.mark.parametrize("fault", [lose_power])
def test_callers_of_other_machines_get_answers_again_within_a_minute(
    endpoint: Endpoint, fault: Callable[[Machine], None]
) -> None:
    head, asking, lost = endpoint.nodes
    running = endpoint.call(asking, [endpoint.url(head), endpoint.url(asking)], 90)
    assert running.stdout is not None
    lines = [running.stdout.readline() for _ in range(20)]
    at_s = time.time()
    fault(lost)
    rest, _ = running.communicate(timeout=SECONDS)
    answers = callers.parsed([*lines, *rest.splitlines()])
    bad = [(asked_s - at_s, took_s, status) for asked_s, took_s, status in answers if status != "200"]
    slow = [(asked_s - at_s, took_s) for asked_s, took_s, status in answers if status == "200" and took_s > 5]
    print(f"{fault.__name__}: {len(answers)} answers, refused or failed {bad}, slow {slow}")
    assert max((asked_s + took_s for asked_s, took_s, _ in bad), default=0) < 60
    assert all(took_s < callers.PATIENCE_S for _, took_s, _ in answers)
