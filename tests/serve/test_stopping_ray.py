"""An endpoint that stops answers the requests that wait for an engine, instead of waiting with them."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.serve.cluster_samples import STEP_SECONDS, cluster, deploy_file

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


@pytest.mark.slow
def test_a_request_that_waits_for_an_engine_is_sent_away_when_the_endpoint_stops(tmp_path: Path) -> None:
    config = deploy_file(
        tmp_path / "serve.yaml",
        {"model_wait_s": 10 * STEP_SECONDS},
        autoscaling_config={"min_replicas": 0, "max_replicas": 1},
        ray_actor_options={"resources": {"nowhere": 1}},
    )
    with cluster("--config", str(config)) as running, ThreadPoolExecutor(1) as callers:
        [before] = running.metric("mars:http_requests_in_flight").values()
        body = {"model": "bundled", "prompt": "x"}
        answer = callers.submit(httpx2.post, f"{running.url}/v1/completions", json=body, timeout=5 * STEP_SECONDS)
        while sum(running.metric("mars:http_requests_in_flight").values()) <= before:
            pass
        running.process.send_signal(signal.SIGTERM)
        running.process.communicate(timeout=STEP_SECONDS)
        refused = answer.result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
        assert "the engines are stopping" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert running.process.returncode == 0
