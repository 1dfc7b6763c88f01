"""`mars-ray serve` on several machines: fronts and engines on all, and what callers see when one is lost."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mars_ray.model.resolve import resolve_model
from tests.machines import callers
from tests.machines.endpoint import Endpoint, deploy, start_endpoint
from tests.machines.faults import asking, seen, told
from tests.machines.machines import WORK, Machine

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
ENGINES = 2


@pytest.fixture(scope="module")
def endpoint(nodes: list[Machine]) -> Endpoint:
    return start_endpoint(nodes, gateways=3, engines=ENGINES)


def test_every_machine_answers_and_the_controller_sees_all_engines(endpoint: Endpoint) -> None:
    with asking(endpoint, endpoint.nodes, 5) as asked:
        pass
    assert not asked.failed
    assert "2 replicas" in endpoint.status()


def roll_out(endpoint: Endpoint, **args: Any) -> None:
    """Deploy with other settings under callers, of whom none may fail; all is new then."""
    before = seen(endpoint)
    [application] = endpoint.config["applications"]
    application["args"] |= args
    with asking(endpoint, endpoint.nodes, 90) as asked:
        deploy(endpoint.nodes[0], endpoint.config)
        took_s = time.time() - asked.at_s
    print(f"\n{args}: all of it new after {took_s:.0f} s; {asked}")
    assert not asked.failed
    assert len(seen(endpoint)) == ENGINES
    assert not seen(endpoint) & before


def test_a_new_config_is_rolled_out_and_no_request_fails(endpoint: Endpoint) -> None:
    roll_out(endpoint, threshold=0.9)
    assert "0.9" in endpoint.status()


def said(endpoint: Endpoint, prompt: str) -> str:
    """Return a greedy completion."""
    body = {"model": "bundled", "prompt": prompt, "max_tokens": 16, "temperature": 0, "mode": "ar"}
    words = "-H", "content-type: application/json", "-d", json.dumps(body)
    found: str = json.loads(told(endpoint, "/v1/completions", *words))["choices"][0]["text"]
    return found


def test_a_new_model_is_rolled_out_and_no_request_fails(endpoint: Endpoint, tmp_path: Path) -> None:
    for path in resolve_model("bundled").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    torch.manual_seed(0)
    other = {name: each * (1 + 0.2 * torch.randn_like(each)) for name, each in weights.items()}
    save_file(other, tmp_path / "model.safetensors", {"format": "pt"})
    for each in endpoint.nodes:  # Ray builds the application where a CPU is free
        each.copy(tmp_path, "other")
    before = said(endpoint, "Ada lives in")
    roll_out(endpoint, model=f"{WORK}/other", name="bundled")
    assert before != said(endpoint, "Ada lives in")


def test_callers_of_other_machines_get_answers_again_within_a_minute(endpoint: Endpoint) -> None:
    head, other, lost = endpoint.nodes
    with asking(endpoint, [other], 90, "--stream") as streamed, asking(endpoint, [other, head], 90) as asked:
        lost.power_off()
    print(f"\npower cut: {asked}\n  streams: {streamed}, longest pause {streamed.longest_pause_s} s")
    assert not streamed.broken
    assert max((at_s + took_s for at_s, took_s, _ in asked.failed), default=0) < 60
    assert all(took_s < callers.PATIENCE_S for _, took_s, _ in asked.answers)
