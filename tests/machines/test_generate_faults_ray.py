"""A job on three machines, and what happens to them: no row is lost or there twice, and the job ends by itself."""

import json
import re
import subprocess
import time
from collections.abc import Callable

import pytest

from mars_ray.model.resolve import resolve_model
from tests.machines.machines import Machine

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROWS, SECONDS = 6000, 400
CUT_OFF_S = 30


@pytest.fixture(scope="module")
def model(nodes: list[Machine]) -> str:
    nodes[0].copy(resolve_model("bundled"), "model")
    return "model"


def lose_power(machine: Machine) -> None:
    machine.power_off()


def be_cut_off(machine: Machine) -> None:
    machine.cut_off()
    time.sleep(CUT_OFF_S)
    machine.put_back()


@pytest.mark.parametrize(("number", "fault"), [(2, lose_power), (1, be_cut_off)])
def test_every_row_is_answered_once_whatever_happens_to_a_machine(
    nodes: list[Machine], model: str, number: int, fault: Callable[[Machine], None]
) -> None:
    driver, lost = nodes[0], nodes[number]
    name = fault.__name__
    rows = [{"id": str(row), "prompt": f"say {row}"} for row in range(ROWS)]
    driver.write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    job = driver.start(
        "mars-ray", "generate", "--input", "rows.jsonl", "--output", name, "--model", model, "--workers", "3",
        "--max-tokens", "32", "--format", "jsonl",
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert job.stderr is not None
    said = []
    for line in job.stderr:
        said.append(line)
        if re.search(r"[1-9]\d* under way", line):
            break
    began_s = time.monotonic()
    fault(lost)
    _, rest = job.communicate(timeout=SECONDS)
    print(f"{name}: {time.monotonic() - began_s:.0f} s from the fault to the end", *said, rest)
    assert job.returncode == 0
    answers = driver.run("sh", "-c", f"cat {name}/rows/*").stdout.splitlines()
    assert sorted(int(json.loads(line)["id"]) for line in answers) == list(range(ROWS))
