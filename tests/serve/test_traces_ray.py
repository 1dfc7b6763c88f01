"""Traces of an endpoint and of a job, as their users start them on Ray."""

import json
import os
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.factories.otlp import collector
from tests.serve.cluster_samples import COMMAND, STEP_SECONDS, cluster, deploy_file

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(400)]

PARENT = "00f067aa0ba902b7"
MESSAGES = [{"role": "user", "content": "Ann, Bob: put them in a numbered list."}]


def test_requests_through_every_gateway_join_the_traces_of_their_callers(tmp_path: Path) -> None:
    config = str(deploy_file(tmp_path / "serve.yaml", {}, gateways=2))
    with collector() as found:
        with cluster("--config", config, environment=found.environment()) as running:
            for number in range(1, 21):
                body = {"model": "bundled", "messages": MESSAGES, "max_tokens": 8, "stream": number % 2 == 0}
                request = urllib.request.Request(
                    f"{running.url}/v1/chat/completions",
                    json.dumps(body).encode(),
                    {"content-type": "application/json", "traceparent": f"00-{number:032x}-{PARENT}-01"},
                )
                urllib.request.urlopen(request, timeout=STEP_SECONDS).read()
            traces = [found.trace(f"{number:032x}", root="POST /v1/chat/completions") for number in range(1, 21)]
        for number, spans in enumerate(traces, start=1):
            expected = {"POST /v1/chat/completions", "chat bundled", "queue", "read", "decode"}
            assert spans.keys() == (expected | {"stream"} if number % 2 == 0 else expected)
            assert spans["POST /v1/chat/completions"][0].parent_id == PARENT
        gateways = {spans["decode"][0].resource["service.instance.id"] for spans in traces}
        assert len(gateways) == 2


def test_each_row_of_a_job_is_a_trace_that_links_to_the_job(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": MESSAGES, "number": number}) + "\n" for number in range(40)))
    command = [str(COMMAND), "generate", "--model", "bundled", "--input", str(rows), "--output", str(tmp_path / "out")]
    with collector() as found:
        subprocess.run([*command, "--max-tokens", "8"], check=True, timeout=300, env=os.environ | found.environment())
        [job] = [span for span in found.spans if span.name == "generate"]
        linked = [span for span in found.spans if span.name == "row"]
        decodes = {span.parent_id for span in found.spans if span.name == "decode"}
    assert [row.links for row in linked] == [((job.trace_id, job.span_id),)] * 40
    assert {row.span_id for row in linked} == decodes
    assert job.attributes["mars_ray.rows.done"] == 40
