"""What the endpoint tells operators adds up, is what dashboards ask for, and says nothing of what was said."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from mars_ray.control.core.status import ClusterStatus, CurvePoint
from mars_ray.engine.chunk import Chunk, Finished
from mars_ray.engine.request import Request, SamplingParams
from mars_ray.engine.stats.state import DraftCounts
from mars_ray.openai_api.usage import ResponseUsage
from mars_ray.serve.http.gateway_metrics import GatewayMetrics, merge_metrics
from mars_ray.serve.middleware.exchange import Exchange, log_exchange
from mars_ray.serve.replicas.engine_metrics import EngineMetrics, openmetrics_text
from tests.control.control_samples import class_state, engine_state
from tests.serve.endpoint_clients import MODEL, http, settled
from tests.serve.endpoint_samples import MESSAGES, Served

DASHBOARD = Path(__file__).parents[2] / "serve_configs" / "grafana.json"
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")

VLLMS = {
    "prompt_tokens", "generation_tokens", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_time_per_output_token_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens", "request_success", "prefix_cache_queries", "prefix_cache_hits",
    "num_preemptions",
}  # fmt: skip
"""Metrics that the dashboards of vLLM and of Ray ask for, without vLLM's prefix."""

DRAFTED = "mars:drafted_tokens_total"

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """Every sample of a text. Fails for one that occurs twice, and for a family that is named twice."""
    named = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(named) == len(set(named))
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    by_name = {(each.name, frozenset(each.labels.items())): each.value for each in found}
    assert len(by_name) == len(found)
    return by_name


def total(found: Samples, name: str, **labels: str) -> float:
    return sum(value for (each, has), value in found.items() if each == name and labels.items() <= set(has))


@pytest.fixture
def plain(endpoint: Served) -> Iterator[httpx2.Client]:
    settled(endpoint)
    with http(endpoint) as client:
        yield client


def scraped(plain: httpx2.Client, endpoint: Served) -> Samples:
    settled(endpoint)
    return samples(plain.get("/metrics").text)


def test_counters_add_up_to_what_callers_were_told(plain: httpx2.Client, endpoint: Served) -> None:
    before, usages = scraped(plain, endpoint), []
    for fields in ({}, {"n": 3}, {"max_tokens": 2}, {"mode": "exact"}, {"stream": True}):
        body = {"model": MODEL, "messages": MESSAGES, "stream_options": {"include_usage": True}} | fields
        text = plain.post("/v1/chat/completions", json=body).text
        usages.append(json.loads(text.split("data: ")[-2] if "stream" in fields else text)["usage"])
    after = scraped(plain, endpoint)

    def grown(name: str, **labels: str) -> float:
        return sum(
            total(after, f"{prefix}:{name}", **labels) - total(before, f"{prefix}:{name}", **labels)
            for prefix in ("mars", "vllm")
        )

    generated = sum(usage["completion_tokens"] for usage in usages)
    assert grown("generation_tokens_total") == grown("accepted_tokens_sum") == generated
    assert grown("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    hits = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grown("prefix_cache_hits_total") == hits > 0
    assert grown("sequence_forwards_total") == grown("accepted_tokens_count") == grown("block_count")
    assert grown("request_success_total") == grown("e2e_request_latency_seconds_count") == 7
    assert grown("time_to_first_token_seconds_count") == 7
    assert grown("inter_token_latency_seconds_count") < generated
    assert grown("http_requests_total", route="/v1/chat/completions", status="200") == 5


def test_refusals_are_counted_by_their_code_wherever_they_arise(plain: httpx2.Client, endpoint: Served) -> None:
    before = scraped(plain, endpoint)
    plain.post("/v1/chat/completions", content=b"{", headers={"content-type": "application/json"})
    plain.post("/v1/completions", json={"model": "other", "prompt": "a"})
    plain.post("/v1/completions", json={"model": MODEL, "prompt": [5] * 5000})
    plain.post("/v1/completions", content=b"x" * 2**21)
    after = scraped(plain, endpoint)
    for code in ("invalid_json", "model_not_found", "context_length_exceeded", "body_too_large"):
        assert total(after, "mars:http_refused_total", code=code) == 1 + total(
            before, "mars:http_refused_total", code=code
        )


def test_paths_a_caller_makes_up_are_one_route(plain: httpx2.Client, endpoint: Served) -> None:
    for number in range(5):
        plain.get(f"/made/up/{number}")
    routes = {dict(labels)["route"] for name, labels in scraped(plain, endpoint) if name == "mars:http_requests_total"}
    assert "other" in routes
    assert not [route for route in routes if "made" in route]


def test_names_people_know_are_there(plain: httpx2.Client, endpoint: Served) -> None:
    families = {family.name for family in text_string_to_metric_families(plain.get("/metrics").text)}
    assert {f"vllm:{name}" for name in VLLMS} == {name for name in families if name.startswith("vllm:")}


@pytest.mark.platform
def test_every_metric_the_dashboard_asks_for_is_there_and_filtered_by_model(
    plain: httpx2.Client, endpoint: Served
) -> None:
    plain.get("/nothing")
    exported = {name for name, _ in scraped(plain, endpoint)}
    families = {family.name for family in text_string_to_metric_families(plain.get("/metrics").text)}
    exported |= {f"{family}{suffix}" for family in families for suffix in SUFFIXES[:2]}  # no sample until one is seen
    dashboard = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    for panel in panels:
        for target in panel["targets"]:
            names = re.findall(r"(?:mars|vllm):\w+", target["expr"])
            assert names
            assert set(names) <= exported, panel["title"]
            assert target["expr"].count('{model_name=~"$model_name"') == len(names), panel["title"]
            assert target["datasource"]["uid"] == "${datasource}"
    assert {"datasource", "model_name"} == {each["name"] for each in dashboard["templating"]["list"]}
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Traffic", "Latency", "Engine", "Looking ahead", "Batches and usage"]


def test_every_metric_there_is_can_be_seen_on_the_dashboard(plain: httpx2.Client) -> None:
    asked = DASHBOARD.read_text()
    families = {family.name for family in text_string_to_metric_families(plain.get("/metrics").text)}
    assert not [family for family in families if family not in asked]


# Several processes.


@given(st.lists(st.dictionaries(st.sampled_from("ab"), st.integers(0, 9), min_size=1), min_size=1, max_size=4))
def test_merging_keeps_every_sample_of_every_text(processes: list[dict[str, int]]) -> None:
    texts = []
    for number, figures in enumerate(processes):
        registry = CollectorRegistry()
        for name, value in figures.items():
            labels = {"process": str(number)}
            Counter(f"mars:{name}", "Text.", [*labels], registry=registry).labels(**labels).inc(value)
            Gauge(f"mars:g{name}", 'With "quotes"\nand lines.', [*labels], registry=registry).labels(**labels).set(
                value
            )
            Histogram(f"mars:h{name}", "Text.", [*labels], registry=registry).labels(**labels).observe(value)
        texts.append(openmetrics_text(registry))
    together: Samples = {}
    for text in texts:
        together |= samples(text.removesuffix("# EOF\n"))
    page, _ = merge_metrics(texts)
    assert samples(page.decode()) == together


STATE = engine_state(
    class_state("gold", running=1),
    class_state("batch", threshold=0.8, waiting=2),
    block=8,
    profile=(),
    step_time=None,
)


def test_figures_of_replicas_and_fronts_stand_side_by_side() -> None:
    engines = [EngineMetrics(model="m", replica=name) for name in ("r1", "r2")]
    for number, each in enumerate(engines, 1):
        each.generation_tokens.inc(number)
    gateway = GatewayMetrics(model="m", gateway="f").text(5, None, {"dropped": 3})
    found = samples(merge_metrics([gateway, *(each.text(STATE) for each in engines)])[0].decode())
    assert total(found, "mars:trace_spans", outcome="dropped") == 3
    assert total(found, "vllm:generation_tokens_total", replica="r2") == 2
    assert total(found, "vllm:generation_tokens_total") == 3
    assert total(found, "vllm:num_requests_waiting") == 4
    assert total(found, "vllm:num_requests_running") == 2
    assert total(found, "mars:threshold", replica="r1", service_class="gold") == 0.95
    assert total(found, "mars:threshold", replica="r1", service_class="batch") == 0.8
    assert total(found, "mars:http_requests_in_flight", gateway="f") == 5


def test_prices_are_gauges_of_the_whole_cluster_and_vanish_when_they_are_unknown() -> None:
    point = CurvePoint(threshold=0.95, tokens_s=9.0, demand=2.0, price_per_million_tokens=0.7)
    status = ClusterStatus(
        policy="fixed",
        epoch=1,
        desired_replicas=1,
        replicas=(),
        classes=(),
        price_per_million_tokens=0.8,
        curve=(point, replace(point, threshold=0.9, price_per_million_tokens=None)),
    )
    metrics = GatewayMetrics(model="m", gateway="f")
    found = samples(merge_metrics([metrics.text(0, status, {})])[0].decode())
    assert found["mars:price_per_million_tokens", frozenset({("model_name", "m")})] == 0.8
    expected = [labels for name, labels in found if name == "mars:expected_price_per_million_tokens"]
    assert expected == [frozenset({("model_name", "m"), ("threshold", "0.95")})]
    assert total(found, "mars:expected_price_per_million_tokens") == 0.7
    assert not [name for name, _ in samples(merge_metrics([metrics.text(0, None, {})])[0].decode()) if "price" in name]


def test_times_are_those_of_the_clock() -> None:
    now_s = 100.0
    metrics = EngineMetrics(model="m", replica="r", clock=lambda: now_s)
    seen = metrics.begin(Request(id="1", prompt=(1, 2, 3), sampling=SamplingParams(max_tokens=3)))
    now_s = 102.0
    seen.observe(Chunk("1", 0, (1,), ("a",), masks=3))
    now_s = 106.0
    finished = Finished("stop", prompt_tokens=3, cached_tokens=2, tokens=3, forwards=2, queued_s=1.5,
                        prefill_s=0.5, decode_s=4)  # fmt: skip
    seen.observe(Chunk("1", 0, (1, 2), ("a", "b"), masks=3, finished=finished))
    found = samples(merge_metrics([metrics.text(STATE)])[0].decode())
    sums = {name: total(found, f"vllm:{name}_seconds_sum") for name in
            ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time",
             "request_prefill_time", "request_decode_time", "request_time_per_output_token")}  # fmt: skip
    assert sums == {
        "time_to_first_token": 2, "inter_token_latency": 4, "e2e_request_latency": 6, "request_queue_time": 1.5,
        "request_prefill_time": 0.5, "request_decode_time": 4, "request_time_per_output_token": 2,
    }  # fmt: skip
    assert total(found, "vllm:request_max_num_generation_tokens_sum") == 3
    assert total(found, "mars:block_sum") == 8
    assert total(found, "vllm:inter_token_latency_seconds_count") == 2


def test_preemptions_are_counted_once_however_often_the_metrics_are_read() -> None:
    metrics = EngineMetrics(model="m", replica="r")
    for preemptions in (3, 3, 5):
        text = metrics.text(replace(STATE, preemptions=preemptions))
    assert total(samples(merge_metrics([text])[0].decode()), "vllm:num_preemptions_total") == 5


def test_counters_by_label_go_on_when_a_new_engine_process_counts_from_0() -> None:
    metrics = EngineMetrics(model="m", replica="r")
    for drafted in ({"text": 5, "masks": 9}, {"text": 7, "masks": 9}, {"text": 2}):
        text = metrics.text(replace(STATE, drafts=tuple(DraftCounts(*counts, right=0) for counts in drafted.items())))
    values = samples(merge_metrics([text])[0].decode())
    by_source = {dict(labels)["source"]: value for (name, labels), value in values.items() if name == DRAFTED}
    assert by_source == {"text": 9, "masks": 9}


def test_a_traced_request_is_the_exemplar_of_its_times_where_the_scraper_reads_openmetrics() -> None:
    metrics = EngineMetrics(model="m", replica="r")
    finished = Finished("stop", prompt_tokens=3, cached_tokens=2, tokens=3, forwards=2, queued_s=1.5)
    for trace_id in ("", TRACE):
        seen = metrics.begin(Request(id="1", prompt=(1,), trace_id=trace_id))
        seen.observe(Chunk("1", 0, (1, 2), ("a", "b"), finished=finished))
    page, media_type = merge_metrics([metrics.text(STATE)], "application/openmetrics-text; version=1.0.0")
    assert media_type.startswith("application/openmetrics-text; version=1.0.0")
    exemplars = {
        family.name: sample.exemplar.labels
        for family in openmetrics_families(page.decode())
        for sample in family.samples
        if sample.exemplar
    }
    assert exemplars["vllm:time_to_first_token_seconds"] == {"trace_id": TRACE}
    assert exemplars["vllm:request_queue_time_seconds"] == {"trace_id": TRACE}
    page, media_type = merge_metrics([metrics.text(STATE)])
    assert media_type.startswith("text/plain") and TRACE not in page.decode()


# The log.


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "mars_ray.requests"]


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_one_line_with_its_figures_and_without_its_prompt(
    plain: httpx2.Client, endpoint: Served, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO, logger="mars_ray.requests")
    head = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01", "x-request-id": "mine-2"}
    body = {"model": MODEL, "messages": MESSAGES, "n": 2, "stream": stream, "threshold": 0.5, "max_tokens": 5}
    plain.post("/v1/chat/completions", json=body, headers=head)
    settled(endpoint)
    [line] = lines(caplog)
    assert (line["request_id"], line["trace_id"], line["key"]) == ("mine-2", TRACE, "anonymous")
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", 200)
    assert (line["tokens"], line["reasons"]) == (10, ["length", "length"])
    assert (line["threshold_low"], line["threshold_high"]) == (0.5, 0.5)
    assert line["seconds"] >= line["headers_s"] > 0
    assert "Oscar" not in caplog.text


def test_a_refusal_is_logged_by_its_code_and_open_paths_are_not(
    plain: httpx2.Client, endpoint: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="mars_ray.requests")
    plain.get("/healthz")
    plain.get("/readyz")
    plain.post("/v1/completions", json={"model": MODEL, "prompt": "secret", "tempature": 1})
    settled(endpoint)
    [line] = lines(caplog)
    assert (line["status"], line["code"]) == (400, "unknown_parameter")
    assert "secret" not in caplog.text


def test_whatever_a_caller_names_itself_a_request_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mars_ray.requests")
    path = '/v1/x\n{"key": "root"}\u2028\udcff'
    log_exchange(
        Exchange(request_id="1", method="GET", path=path, arrived_unix_s=1.23456789, key="ada", usage=ResponseUsage(3))
    )
    [record] = caplog.records
    assert len(record.getMessage().splitlines()) == 1
    assert json.loads(record.getMessage())["path"] == path
    assert json.loads(record.getMessage())["prompt_tokens"] == 3


def test_no_more_than_200_characters_of_a_path_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="mars_ray.requests")
    log_exchange(Exchange(request_id="1", method="GET", path="/" + "\u2028" * 16_000, arrived_unix_s=1.0, key="ada"))
    [record] = caplog.records
    assert len(json.loads(record.getMessage())["path"]) == 200
