"""Batch jobs under a controller, on a real cluster: deadlines, and making way for an endpoint's callers."""

import asyncio
import json
import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import ray

from mars_ray.batch.output.ledger import LEDGER, rows_done
from mars_ray.batch.output.report import JobReport
from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.run.options import GenerateOptions
from mars_ray.control.core.ray_controller import BATCH, RayController, remove_controllers
from mars_ray.control.core.status import ClusterStatus
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import UnavailableError
from mars_ray.model.resolve import resolve_model
from mars_ray.ray_private import NAMESPACE
from tests.control.control_samples import class_state, plan_of, report
from tests.factories.jobs import generate_options

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]
SECONDS = 120


def options(place: Path, rows: int, deadline_s: float) -> GenerateOptions:
    source = place / "rows.jsonl"
    source.write_text("".join(json.dumps({"id": f"row-{n}", "prompt": f"say {n}"}) + "\n" for n in range(rows)))
    sampling = SamplingParams(max_tokens=60)
    return generate_options(source, place / "out", resolve_model("bundled"), sampling=sampling, deadline_s=deadline_s)


@pytest.mark.slow
def test_a_job_with_time_to_spare_is_done_at_full_quality(tmp_path: Path) -> None:
    done = generate_files(options(tmp_path, 20, deadline_s=3600))
    assert done.deadline.endswith("before the deadline")
    assert set(pq.read_table(tmp_path / "out" / "rows")["threshold"].to_pylist()) == {1.0}


@pytest.mark.slow
def test_a_job_that_cannot_be_in_time_is_as_fast_as_it_may_be_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = generate_files(options(tmp_path, 6000, deadline_s=12))
    assert done.deadline.endswith("after the deadline")
    # With all rows in use, a busy machine may be as fast at threshold 1 as at any other.
    fastest = re.search(r"late: even at threshold (\S+), the fastest that quality allows", capsys.readouterr().err)
    assert fastest and float(fastest[1]) in pq.read_table(tmp_path / "out" / "rows")["threshold"].to_pylist()


class Shop(threading.Thread):
    """An endpoint whose callers wait, until `calm` is set."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.calm, self.over = threading.Event(), threading.Event()

    def run(self) -> None:
        async def beat() -> None:
            controller, number = RayController("shop", plan_of()), 0
            while not self.over.is_set():
                number += 1
                waiting = 0 if self.calm.is_set() else 3
                with suppress(UnavailableError):  # its process is not up yet
                    await controller.handle_report(report(number, float(number), class_state(waiting=waiting)))
                await asyncio.to_thread(self.over.wait, 0.5)

        asyncio.run(beat())


def job_status() -> ClusterStatus | None:
    """What the controller of the batch job says, once there is one."""
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    found = next((name for name in names if name.startswith(f"controller:{BATCH}")), None)
    if found is None:
        return None
    status: ClusterStatus = ray.get(ray.get_actor(found, namespace=NAMESPACE).call.remote("status"))
    return status


@pytest.mark.slow
def test_workers_take_no_new_rows_while_callers_wait(tmp_path: Path) -> None:
    shop, reports = Shop(), list[JobReport]()
    shop.start()
    given = options(tmp_path, 3000, deadline_s=100)
    job = threading.Thread(target=lambda: reports.append(generate_files(given)))
    job.start()
    try:
        ends_s, idle = time.monotonic() + SECONDS, 0
        while idle < 3:  # an engine that has work is never without a row between two of its steps
            assert time.monotonic() < ends_s and not reports
            status = job_status()
            busy = [each.state.running + each.state.waiting for each in status.replicas] if status else []
            idle = idle + 1 if busy == [0] else 0
            threading.Event().wait(1.0)
        assert rows_done(tmp_path / "out" / LEDGER) < 3000
        shop.calm.set()
        job.join(SECONDS)
        assert reports[0].rows == 3000
    finally:
        shop.over.set()
        shop.join()
        remove_controllers("shop")
