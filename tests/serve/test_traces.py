"""Spans of requests: they join the caller's trace, say where the time went, say nothing of what was said, and never
hold up a request."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.errors import ConfigError, ReplicaLostError
from mars_ray.serve.replicas.engine_client import EngineClient, Take
from mars_ray.traces.trace_settings import traces_are_on
from tests.factories.otlp import Collector, collector
from tests.serve.endpoint_clients import MODEL, http, settled
from tests.serve.endpoint_samples import MESSAGES, Served, config_of, served
from tests.serve.key_samples import add_key

PARENT = "00f067aa0ba902b7"
CHAT = "POST /v1/chat/completions"
SERVER, INTERNAL = 2, 1


def trace_id(number: int) -> str:
    return f"{number:032x}"


class Losing:
    """Loses the replica of the first request of a stream after its first chunk, and of a whole answer at once."""

    def __init__(self, client: EngineClient) -> None:
        self._client, self.losing = client, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, request: Request, take: Take, *, whole: bool = False) -> None:
        async def take_some(part: Sequence[Chunk]) -> None:
            await take(part)
            self._lose()

        if whole:
            self._lose()
        await self._client.generate(request, take_some, whole=whole)

    def _lose(self) -> None:
        if self.losing:
            self.losing = False
            raise ReplicaLostError("lost")

    async def metrics(self) -> list[str]:
        return await self._client.metrics()


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def collected() -> Iterator[Collector]:
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def losing() -> list[Losing]:
    return []


@pytest.fixture(scope="module")
def traced(collected: Collector, losing: list[Losing], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An endpoint whose operator turned on traces, the logging of prompts, and keys."""

    def wrap(client: EngineClient) -> EngineClient:
        losing.append(Losing(client))
        return losing[0]

    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    KEYS.append(add_key(path, "ada", "operate"))
    variables = collected.environment(
        OTEL_SERVICE_NAME="shop", OTEL_EXPORTER_OTLP_HEADERS="x-tenant=blue", OTEL_RESOURCE_ATTRIBUTES="zone=eu"
    )
    with environment(variables), served(config_of(keys=path, log_prompts=True), wrap) as running:
        yield running


KEYS: list[str] = []


def post(endpoint: Served, number: int, path: str = "/v1/chat/completions", *, sampled: int = 1, **fields: Any) -> str:
    body = {"model": MODEL, "max_tokens": 8} | ({"messages": MESSAGES} if "chat" in path else {}) | fields
    head = {"traceparent": f"00-{trace_id(number)}-{PARENT}-{sampled:02x}", "authorization": f"Bearer {KEYS[0]}"}
    with http(endpoint) as client:
        answer = client.post(path, json=body, headers=head)
    settled(endpoint)
    return answer.text


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_a_span_of_the_callers_trace_with_its_times_below_it(
    traced: Served, collected: Collector, stream: bool
) -> None:
    post(traced, 10 + stream, stream=stream, threshold=0.5, temperature=0.5, seed=3)
    spans = collected.trace(trace_id(10 + stream), root=CHAT)
    [root], [answer] = spans[CHAT], spans[f"chat {MODEL}"]
    assert (root.parent_id, root.kind, answer.parent_id, answer.kind) == (PARENT, SERVER, root.span_id, INTERNAL)
    assert root.attributes["http.request.method"] == "POST"
    assert root.attributes["http.route"] == "/v1/chat/completions"
    assert root.attributes["http.response.status_code"] == 200
    assert (root.resource["service.name"], root.resource["zone"]) == ("shop", "eu")
    assert root.headers["x-tenant"] == "blue"
    said = answer.attributes
    assert (said["gen_ai.operation.name"], said["gen_ai.request.model"]) == ("chat", MODEL)
    assert (said["gen_ai.request.max_tokens"], said["gen_ai.request.temperature"]) == (8, 0.5)
    assert (said["gen_ai.usage.output_tokens"], said["gen_ai.response.finish_reasons"]) == (8, ["length"])
    [queue], [read], [decode] = spans["queue"], spans["read"], spans["decode"]
    assert {each.parent_id for each in (queue, read, decode)} == {answer.span_id}
    assert root.start_s <= queue.start_s <= queue.end_s <= read.end_s < decode.end_s
    assert (queue.end_s, read.end_s) == (pytest.approx(read.start_s), pytest.approx(decode.start_s))
    assert read.attributes["gen_ai.usage.input_tokens"] == said["gen_ai.usage.input_tokens"] > 0
    told = decode.attributes
    assert told["gen_ai.usage.output_tokens"] == 8
    assert told["mars_ray.tokens_per_forward"] == 8 / told["mars_ray.steps"]
    assert (told["mars_ray.threshold.low"], told["mars_ray.threshold.high"]) == (0.5, 0.5)
    assert (told["mars_ray.mode"], told["mars_ray.block"] >= 1) == ("threshold", True)
    assert ("stream" in spans) == stream
    assert not [span for each in spans.values() for span in each if span.failed]


def test_each_answer_to_each_prompt_has_its_spans(traced: Served, collected: Collector) -> None:
    post(traced, 20, "/v1/completions", prompt=["a", "b"], n=2, temperature=1.0)
    spans = collected.trace(trace_id(20), root="POST /v1/completions")
    [answer] = spans[f"text_completion {MODEL}"]
    places = {(each.attributes["mars_ray.prompt"], each.attributes["mars_ray.sequence"]) for each in spans["decode"]}
    assert places == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert (
        sum(each.attributes["gen_ai.usage.output_tokens"] for each in spans["decode"])
        == (answer.attributes["gen_ai.usage.output_tokens"])
    )


@pytest.mark.parametrize(("stream", "event"), [(True, "migration"), (False, "retry")])
def test_the_loss_of_a_replica_is_an_event(
    traced: Served, collected: Collector, losing: list[Losing], stream: bool, event: str
) -> None:
    losing[0].losing = True
    post(traced, 30 + stream, stream=stream)
    [answer] = collected.trace(trace_id(30 + stream), root=CHAT)[f"chat {MODEL}"]
    assert answer.events == (event,)


def test_a_refusal_is_a_span_with_its_code_and_not_a_failure_of_the_server(
    traced: Served, collected: Collector
) -> None:
    post(traced, 40, temperature=-1)
    spans = collected.trace(trace_id(40), root=CHAT)
    [[root]] = spans.values()
    assert root.attributes["http.response.status_code"] == 400
    assert root.attributes["error.type"] and not root.failed


def test_the_callers_sampled_flag_holds_and_unknown_callers_and_probes_make_no_spans(
    traced: Served, collected: Collector
) -> None:
    post(traced, 50, sampled=0)
    head = {"traceparent": f"00-{trace_id(51)}-{PARENT}-01"}
    with http(traced) as client:
        assert client.post("/v1/chat/completions", json={}, headers=head).status_code == 401
        assert client.get("/healthz", headers=head).status_code == 200
    post(traced, 52)
    collected.trace(trace_id(52), root=CHAT)
    assert not {trace_id(50), trace_id(51)} & {span.trace_id for span in collected.spans}


def test_a_request_without_a_trace_gets_one_whose_id_is_in_the_exemplars(traced: Served, collected: Collector) -> None:
    with http(traced) as client:
        head = {"authorization": f"Bearer {KEYS[0]}"}
        for parent in ("", "00-nonsense-01"):
            body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2, "temperature": 0.25}
            client.post("/v1/chat/completions", json=body, headers=head | {"traceparent": parent})
        settled(traced)
        page = client.get("/metrics", headers=head | {"accept": "application/openmetrics-text"})
    until_s = time.monotonic() + 60
    # The exemplar of a bucket is its last request, which of both spans comes later.
    while len(mine := [each for each in collected.spans if each.name == CHAT and not each.parent_id]) < 2:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert any(f'trace_id="{each.trace_id}"' in page.text for each in mine)
    assert page.text.endswith("# EOF\n")


def test_no_prompt_no_answer_and_no_key_is_sent(traced: Served, collected: Collector) -> None:
    prompt = "xylophone zebra"
    answer = post(traced, 60, messages=[{"role": "user", "content": prompt}], user="mallory", max_tokens=30)
    post(traced, 61, "/v1/completions", prompt=prompt, suffix="quokka", stop=["wombat"])
    collected.trace(trace_id(60), root=CHAT)
    collected.trace(trace_id(61), root="POST /v1/completions")
    for secret in ("xylophone", "zebra", "wombat", "quokka", "mallory", "Oscar", "Dallas", KEYS[0], answer[-40:]):
        assert secret.encode() not in collected.raw


# A collector that is down or slow.


def test_a_collector_that_answers_nothing_holds_up_no_request_and_fills_no_memory() -> None:
    with collector() as stuck:
        stuck.open.clear()
        sizes = stuck.environment(OTEL_BSP_MAX_QUEUE_SIZE="12", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="4")
        with environment(sizes | {"OTEL_EXPORTER_OTLP_TIMEOUT": "60"}), served(config_of()) as endpoint:
            with http(endpoint) as client:
                for _ in range(8):
                    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}
                    assert client.post("/v1/chat/completions", json=body).status_code == 200
                settled(endpoint)
                text = client.get("/metrics").text
            values = {
                outcome: float(line.split()[-1])
                for line in text.splitlines()
                for outcome in ("exported", "dropped", "failed")
                if line.startswith("mars:trace_spans{") and f'outcome="{outcome}"' in line
            }
            # 8 requests have 5 spans each; 12 wait, and a batch of 4 or less is under way.
            assert values["exported"] == values["failed"] == 0
            assert 40 - 12 - 4 <= values["dropped"] <= 40 - 12


def test_spans_that_a_collector_refuses_are_counted() -> None:
    from mars_ray.traces.tracer import Tracer

    with collector() as refusing, environment(refusing.environment()):
        refusing.status = 400
        tracer = Tracer(refusing.environment(), instance="i")
        tracer.start("a", 1.0).end()
        tracer.close()
    assert tracer.counts() == {"exported": 0, "dropped": 0, "failed": 1}


# Settings.


def test_traces_are_off_without_an_endpoint_and_then_the_sdk_is_not_loaded() -> None:
    # FastAPI imports the interfaces of OpenTelemetry.
    program = (
        "import sys, mars_ray.serve.http.gateway_app as app; app.open_spans('x', app.ROUTES);"
        "print([name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'opentelemetry.exporter'))])"
    )
    off = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=off)
    assert done.stdout == "[]\n"


ON = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        (ON, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, True),
        (ON | {"OTEL_SDK_DISABLED": "true"}, False),
        (ON | {"OTEL_SDK_DISABLED": "false"}, True),
        (ON | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ON | {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
    ],
)
def test_the_standard_variables_turn_traces_on_and_off(variables: dict[str, str], on: bool) -> None:
    assert traces_are_on(variables) is on


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, r"OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'; it must be 'http/protobuf'"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, r"OTEL_TRACES_EXPORTER is 'zipkin'; it must be 'otlp' or 'none'"),
    ],
)
def test_what_is_not_supported_is_refused(variable: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        traces_are_on(ON | variable)


def test_a_sampler_is_followed() -> None:
    from mars_ray.traces.tracer import Tracer

    with environment(ON | {"OTEL_TRACES_SAMPLER": "always_off"}):
        tracer = Tracer(ON, instance="i")
        assert not tracer.start("a", 1.0).get_span_context().trace_flags.sampled
        tracer.close()
