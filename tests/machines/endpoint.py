"""An endpoint on several machines: how it is deployed, and asked."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.machines import callers
from tests.machines.machines import Machine

PORT, SECONDS = 8000, 150


@dataclass
class Endpoint:
    """A running endpoint."""

    nodes: list[Machine]
    key: str
    config: dict[str, Any]

    def url(self, machine: Machine) -> str:
        return f"http://{machine.address}:{PORT}"

    def call(self, machine: Machine, urls: list[str], seconds: float, *more: str) -> "subprocess.Popen[str]":
        """Let callers on a machine ask; what they print is `callers.parsed`."""
        program = Path(callers.__file__)
        words = ["--key", self.key, "--seconds", str(seconds), *more]
        return machine.start(sys.executable, program, *urls, *words, stdout=subprocess.PIPE)

    def status(self) -> str:
        """What an operator sees."""
        done = self.nodes[0].run(
            "mars-ray", "status", "--once", "--url", self.url(self.nodes[0]), "--api-key", self.key
        )
        return done.stdout


def start_endpoint(
    machines: Sequence[Machine], *, gateways: int, engines: int | dict[str, Any], **args: Any
) -> Endpoint:
    """Deploy so many replicas from the first of the machines. `engines` may be settings of Serve's autoscaler, `args`
    are of `ServeConfig`."""
    first, *others = machines
    made = first.run("mars-ray", "keys", "add", "--file", "keys.yaml", "--name", "ann", "--role", "operate")
    keys = first.run("cat", "keys.yaml").stdout
    for each in others:
        each.write("keys.yaml", keys)
    config = config_for(machines, gateways=gateways, engines=engines, args=args)
    deploy(first, config)
    return Endpoint(list(machines), made.stdout.split()[-1], config)


def config_for(
    machines: Sequence[Machine], *, gateways: int, engines: int | dict[str, Any], args: dict[str, Any]
) -> dict[str, Any]:
    """Return a deploy file for so many replicas, two gateways and an engine on a machine; keys are in `keys.yaml`."""
    scale = {"num_replicas": engines} if isinstance(engines, int) else {"autoscaling_config": engines}
    soon = {"health_check_period_s": 1, "health_check_timeout_s": 3}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": PORT},
        "applications": [
            {
                "name": "mars",
                "route_prefix": "/",
                "import_path": "mars_ray.ray_serve:build_openai_app",
                "args": {
                    "keys": "/tmp/work/keys.yaml",
                    "allowed_hosts": [each.address for each in machines],
                    **args,
                },
                "deployments": [
                    {"name": "Gateway", "num_replicas": gateways, "max_replicas_per_node": 2, **soon},
                    {
                        "name": "Engine",
                        **scale,
                        "max_replicas_per_node": 1,
                        "ray_actor_options": {"num_cpus": 1},
                        **soon,
                    },
                ],
            }
        ],
    }


def deploy(machine: Machine, config: dict[str, Any]) -> None:
    """Serve what the config says, from then on instead of what it said before; return when all of it answers."""
    machine.write("serve.yaml", yaml.safe_dump(config))
    served = machine.start(
        "mars-ray", "serve", "--config", "serve.yaml", stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert served.stdout is not None
    said = []
    for line in served.stdout:
        said.append(line)
        if line.startswith("ready"):
            break
    assert said[-1].startswith("ready"), "".join(said)
