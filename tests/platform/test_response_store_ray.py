"""Gateways on a Ray cluster share one store of responses, which outlives its process."""

import asyncio
import re
import time
from pathlib import Path

import pytest
from openai import NotFoundError, OpenAI

from mars_ray.errors import ResponseNotFoundError, UnavailableError
from mars_ray.platform.ray.actors import RayResponseStore
from mars_ray.platform.responses.response_store import StoredResponse
from mars_ray.ray_actor import remove_actor
from mars_ray.ray_cluster import temporary_folder
from tests.serve.cluster_samples import STEP_SECONDS, Cluster, cluster, deploy_file

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(500)]

STORE = "ray::ResponseStoreActor"


def gateways_that_answered(running: Cluster) -> set[str]:
    """Return the gateways that have answered requests of /v1/responses, as far as the one that answers now says."""
    _, text = running.get("/metrics")
    return set(re.findall(r'mars:http_requests_total{gateway="([^"]+)".*route="/v1/responses",status="200"', text))


def test_a_response_made_at_one_gateway_is_continued_at_another_and_outlives_the_store(tmp_path: Path) -> None:
    stores = temporary_folder() / "responses"
    before = set(stores.iterdir()) if stores.exists() else set()
    config = deploy_file(tmp_path / "serve.yaml", {}, gateways=2)
    with cluster("--config", str(config)) as running:
        seen: set[str] = set()
        ends_s = time.monotonic() + STEP_SECONDS
        last: str | None = None
        while len(seen) < 2:
            assert time.monotonic() < ends_s, f"only {seen} answered"
            for _ in range(2):  # and a request for metrics: an odd number, because the gateways take turns
                # A new connection each time, so that the load balancer chooses a gateway again.
                with OpenAI(base_url=f"{running.url}/v1", api_key="none", timeout=STEP_SECONDS) as client:
                    response = client.responses.create(
                        model="bundled", input="Ann", max_output_tokens=1, previous_response_id=last
                    )
                    assert (response.previous_response_id, response.store) == (last, True)  # type: ignore[attr-defined]
                last = response.id
            seen |= gateways_that_answered(running)
        killed = running.kill(STORE)
        with OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=20, timeout=STEP_SECONDS) as client:
            assert client.responses.retrieve(response.id).id == response.id
            assert [process.pid for process in running.processes(STORE)] not in ([], [killed])
            client.responses.delete(response.id)
            with pytest.raises(NotFoundError):
                client.responses.retrieve(response.id)
        assert set(stores.iterdir()) > before
    assert set(stores.iterdir()) <= before, "the texts end with the endpoint"


@pytest.mark.usefixtures("cluster")
def test_clients_of_a_store_that_ended_start_another_which_is_empty() -> None:
    stored = StoredResponse("a", None, "[]", '{"output": []}')

    async def until_stored(client: RayResponseStore) -> None:
        while True:  # on a busy machine the actor's process is up later than a client waits
            try:
                assert await client.put("ada", stored)
                return
            except UnavailableError:
                continue

    async def use() -> None:
        client, other = RayResponseStore("ended"), RayResponseStore("ended")
        await until_stored(client)
        assert await other.get("ada", "a") == stored.response
        await asyncio.to_thread(remove_actor, "responses:ended")
        for each in (client, other):
            with pytest.raises(ResponseNotFoundError):
                await each.get("ada", "a")
        await other.put("ada", stored)
        assert await client.get("ada", "a") == stored.response

    try:
        asyncio.run(use())
    finally:
        remove_actor("responses:ended")
