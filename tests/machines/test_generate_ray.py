"""`mars-ray generate` on several machines that share no disk: input, model and output are on the driver's."""

import json

import pytest

from mars_ray.model.resolve import resolve_model
from tests.machines.machines import Machine

pytestmark = pytest.mark.ray
ROWS = 90


@pytest.mark.slow
def test_machines_of_one_cpu_each_answer_rows_that_only_the_drivers_has(
    nodes: list[Machine],
) -> None:
    driver = nodes[0]
    driver.copy(resolve_model("bundled"), "model")
    driver.write("rows.jsonl", "".join(json.dumps({"id": str(n), "prompt": f"say {n}"}) + "\n" for n in range(ROWS)))
    driver.run(
        "mars-ray", "generate", "--input", "rows.jsonl", "--output", "out", "--model", "model", "--workers", "3",
        "--max-tokens", "4", "--format", "jsonl",
    )  # fmt: skip
    answers = driver.run("sh", "-c", "cat out/rows/*").stdout.splitlines()
    assert sorted(int(json.loads(line)["id"]) for line in answers) == list(range(ROWS))
