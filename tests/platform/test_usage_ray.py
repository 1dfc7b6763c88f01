"""Usage on a Ray cluster: gateways share one meter, and every answer counts once, whatever is killed."""

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import APIError, OpenAI, RateLimitError

from mars_ray.platform.ray.actors import RayMeter
from mars_ray.platform.usage.ledger import UsageLedger
from mars_ray.platform.usage.ledger_files import usage_folder
from mars_ray.platform.usage.usage_report import COLUMNS, UsageQuery
from mars_ray.platform.usage.usage_rows import UsageCounts, UsageGroup, UsageRecord
from mars_ray.ray_actor import remove_actor
from tests.serve.cluster_samples import GATEWAY, STEP_SECONDS, Cluster, cluster, deploy_file
from tests.serve.key_samples import add_key

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]

METER = "ray::MeterActor"
FOREVER = ("0000-01-01", "9999-12-31")
REPORT = UsageQuery(*FOREVER, COLUMNS)
TOKENS = 400
"""Limit of a key per minute."""


def client_of(running: Cluster, key: str, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{running.url}/v1", api_key=key, timeout=STEP_SECONDS, **options)


def ask(client: OpenAI, prompt: str = "Ann", **fields: Any) -> int:
    """Return the tokens of one answer."""
    answer = client.completions.create(model="bundled", prompt=prompt, max_tokens=4, **fields)
    assert answer.usage
    return answer.usage.total_tokens


def config_of(folder: Path, storage: str, limits: dict[str, dict[str, int]]) -> tuple[Path, dict[str, str]]:
    path = folder / "keys.yaml"
    keys = {name: add_key(path, name, "use", limits=own) for name, own in limits.items()}
    return deploy_file(folder / "serve.yaml", {"keys": str(path), "storage": storage}, gateways=2), keys


def used(storage: str, key: str) -> UsageCounts:
    sums = UsageLedger(usage_folder(storage)).view().rows(*FOREVER)
    mine = [counts for group, counts in sums.items() if group.key == key]
    return sum(mine[1:], mine[0]) if mine else UsageCounts(requests=0)


def several(count: int, work: Callable[[], None]) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("store", ["folder", "s3"])
def test_two_gateways_share_limits_and_count_each_answer_once_through_kills(
    tmp_path: Path, store: str, request: pytest.FixtureRequest
) -> None:
    storage = str(tmp_path / "storage") if store == "folder" else f"s3://{request.getfixturevalue('bucket').path}"
    config, keys = config_of(tmp_path, storage, {"free": {}, "limited": {"tokens_per_minute": TOKENS}})
    answers: list[int] = []
    failures: list[str] = []
    with cluster("--config", str(config)) as running:
        # A rate holds across both gateways.
        granted: list[int] = []
        began_s = time.monotonic()

        def press() -> None:
            for _ in range(40):
                # A new connection each time, so that the load balancer chooses a gateway again.
                with client_of(running, keys["limited"], max_retries=0) as client:
                    try:
                        granted.append(ask(client))
                    except RateLimitError as error:
                        assert error.code == "rate_limit_exceeded"

        several(4, press)
        windows = 1 + (time.monotonic() - began_s) // 60
        assert TOKENS * 0.9 <= sum(granted) <= TOKENS * windows
        assert used(storage, "limited").tokens == sum(granted)

        # Answers go on while the meter and a gateway are killed.
        killed_all = threading.Event()

        def go_on() -> None:
            while not killed_all.is_set():
                with client_of(running, keys["free"], max_retries=0) as client:
                    try:
                        answers.append(ask(client))
                    except APIError as error:
                        failures.append(str(error))
                        time.sleep(0.1)

        def more_answers() -> None:
            before, ends_s = len(answers), time.monotonic() + STEP_SECONDS
            while len(answers) < before + 10:
                assert time.monotonic() < ends_s, failures[-3:]
                time.sleep(0.05)

        def kill() -> None:
            try:
                for name in (METER, GATEWAY, METER):
                    more_answers()
                    running.kill(name)
                more_answers()
                family = psutil.Process(running.process.pid).children(recursive=True)
                for process in (*family, psutil.Process(running.process.pid)):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            finally:
                killed_all.set()

        killer = threading.Thread(target=kill)
        killer.start()
        several(3, go_on)
        killer.join()
    with cluster("--config", str(config)) as running, client_of(running, keys["free"]) as client:
        answers += [ask(client) for _ in range(5)]
    counted = used(storage, "free")
    assert len(answers) >= 45
    # A request whose gateway was killed after its record was stored counts, although its answer was lost.
    assert len(answers) <= counted.requests <= len(answers) + len(failures)
    assert sum(answers) <= counted.tokens


@pytest.mark.usefixtures("cluster")
def test_an_actor_that_ended_is_started_again_and_finds_its_storage(tmp_path: Path) -> None:
    row = UsageRecord("batch:1", UsageGroup("2026-11-25", "acme", "ada", "bundled"), UsageCounts(prompt_tokens=4))

    async def use() -> None:
        meter, other = RayMeter("ended", str(tmp_path)), RayMeter("ended", str(tmp_path))
        for _ in range(2):
            await meter.record([row])
            assert (await other.report(REPORT, None))[row.group].prompt_tokens == 4
            assert await other.report(REPORT, "another") == {}
            await asyncio.to_thread(remove_actor, "meter:ended")

    try:
        asyncio.run(use())
    finally:
        remove_actor("meter:ended")
