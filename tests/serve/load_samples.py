"""Load on a running endpoint, and what must be true of it afterwards."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

from mars_ray.data.prompt_file import read_prompts
from mars_ray.load.client import Target
from mars_ray.load.generator import run_load
from mars_ray.load.plan import LoadPlan, bundled_prompts
from mars_ray.load.record import RequestOutcome, RequestRecord
from tests.serve.cluster_samples import STEP_SECONDS, Cluster

PROMPT_POOL = read_prompts(bundled_prompts())

ERROR_BUDGET = 0.0
"""Share of requests that may end in anything but an answer or a 429."""


def until(what: Callable[[], bool], said: Callable[[], Any] = lambda: "") -> None:
    """Wait for what must come."""
    ends_s = time.monotonic() + STEP_SECONDS
    while not what():
        assert time.monotonic() < ends_s, said()
        time.sleep(0.1)


def thresholds(running: Cluster) -> list[float]:
    """In force in each replica."""
    return list(running.metric("mars:threshold").values())


def send(running: Cluster, plan: LoadPlan, clients: int | None = None) -> list[RequestRecord]:
    target = Target(url=running.url, model="bundled", stream=True, timeout_s=120, extra_body={"ignore_eos": True})
    return asyncio.run(run_load(target, plan.requests, clients=clients))


def capacity_per_s(running: Cluster, plan: LoadPlan, requests: int) -> float:
    """Answers per second that 16 clients get, of requests like those of `plan`."""
    closed = (replace(each, scheduled_s=None) for each in islice(plan.requests, requests))
    records = send(running, LoadPlan(closed, requests), clients=16)
    return len(records) / max(record.end_s for record in records)


def nothing_was_lost(running: Cluster, records: list[RequestRecord], sent: int) -> None:
    counted = Counter(record.outcome for record in records)
    print(f"{sent} requests: {dict(counted)}")
    assert len(records) == sent
    assert (
        sum(counted[each] for each in RequestOutcome if each not in (RequestOutcome.OK, RequestOutcome.LIMITED))
        <= ERROR_BUDGET * sent
    )
    assert counted[RequestOutcome.OK] > 0
    assert counted[RequestOutcome.LIMITED] > 0, "the load was no overload"
    running.until_idle()
    assert sum(running.metric("mars:http_requests_in_flight").values()) == 1, "this question alone is in flight"
