"""The command: what it prints and writes, what Ctrl-C leaves, and what it says about bad options."""

import gzip
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from mars_ray.errors import ConfigError, DataError, RunError
from mars_ray.load import client
from mars_ray.load.bench_serve import LoadOptions, bench_serve
from mars_ray.serve.deploy.environment import free_ports
from tests.load.server_samples import SmallServer


def options(url: str = "http://127.0.0.1:1", **changes: Any) -> LoadOptions:
    return LoadOptions(**{"url": url, "timeout": 60.0, **changes})


def prompts(folder: Path, *texts: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return path


def test_a_closed_loop_prints_its_figures_and_reports_every_sample(
    url: str, server: SmallServer, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench_serve(options(f"{url}/v1/", clients=2, requests=6, slo=("ttft:60000", "e2e:60000")))
    assert report["summary"]["requests"] == {"ok": 6}
    assert report["summary"]["goodput"]["fraction"] == 1.0
    assert (len(report["samples"]["rows"]), report["seed"], report["interrupted"]) == (6, 0, False)
    assert report["machine"]["cores"] >= 1
    assert {(body["model"], body["max_tokens"]) for body in server.bodies} == {("small", 128)}
    json.dumps(report, allow_nan=False)
    shown = capsys.readouterr()
    assert "TTFT" in shown.out and "100.0% of all" in shown.out and "closed loop, 2 clients" in shown.out
    assert "requests: 6/6  ok 6" in shown.err


def test_a_trace_is_replayed_at_its_times_and_sizes(url: str, server: SmallServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv.gz"
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:00:00,64,16", "2023-11-16 18:00:10,32,80"]
    trace.write_bytes(gzip.compress("\r\n".join(rows).encode()))
    report = bench_serve(
        options(url, trace=str(trace), speed=1000.0, prompt_scale=1 / 16, output_scale=1 / 8, model="mine")
    )
    assert report["summary"]["requests"] == {"ok": 2}
    assert [len(body["messages"][0]["content"].split()) for body in server.bodies] == [4, 2]
    assert [(body["model"], body["max_tokens"]) for body in server.bodies] == [("mine", 2), ("mine", 10)]
    scheduled = report["samples"]["columns"].index("scheduled_ms")
    assert [row[scheduled] for row in report["samples"]["rows"]] == [0.0, 10.0]


def test_poisson_arrivals_are_sent_without_a_stream_too(url: str, server: SmallServer) -> None:
    report = bench_serve(options(url, trace="poisson:500", requests=10, stream=False, extra_body='{"top_p": 1}'))
    assert report["summary"]["requests"] == {"ok": 10}
    assert report["summary"]["latency_ms"]["ttft"] is None
    assert report["summary"]["latency_ms"]["delay"]["samples"] == 10
    assert all(body["top_p"] == 1 and body["stream"] is False for body in server.bodies)


def test_ctrl_c_ends_the_load_and_what_was_measured_is_shown(
    url: str, server: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on_hang = lambda: os.kill(os.getpid(), signal.SIGINT)
    handler = signal.getsignal(signal.SIGINT)
    report = bench_serve(options(url, prompts=prompts(tmp_path, "stream", "busy", "hang"), clients=1, requests=30))
    assert report["interrupted"] is True
    # Each prompt comes once before any comes again.
    assert report["summary"]["requests"].pop("interrupted") == 1
    assert sum(report["summary"]["requests"].values()) <= 2
    assert "requests: interrupted" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_port_without_a_server_ends_in_one_line_that_says_what_to_do() -> None:
    url = f"http://127.0.0.1:{next(free_ports())}"
    with pytest.raises(RunError, match=rf"{url} cannot be reached .*Start the server, or check --url") as raised:
        bench_serve(options(url))
    assert "\n" not in str(raised.value)


def test_a_server_that_does_not_answer_ends_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "PROBE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:  # connections are made, and nobody reads
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(RunError, match=rf"{url} did not answer within 0.2 s"):
            bench_serve(options(url))


def test_a_server_that_lists_no_model_asks_for_one(url: str, server: SmallServer) -> None:
    with pytest.raises(RunError, match=r"/elsewhere/v1/models answered HTTP 404 and lists no model\. Give --model"):
        bench_serve(options(f"{url}/elsewhere"))
    report = bench_serve(options(f"{url}/elsewhere", model="mine", requests=1))
    assert report["summary"]["errors"] == {"4xx": "HTTP 404: no such path"}


def test_the_command_is_reported_without_the_key() -> None:
    given = options(api_key="secret", clients=3, stream=False, slo=("e2e:5", "ttft:6"), extra_body='{"a": 1}')
    assert given.command() == (
        "mars-ray bench serve --url http://127.0.0.1:1 --clients 3 --no-stream --extra-body '{\"a\": 1}'"
        " --slo e2e:5,ttft:6 --timeout 60.0"
    )
    assert "secret" not in repr(given)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": "127.0.0.1:8000"}, "url is '127.0.0.1:8000'"),
        ({"url": "ftp://host"}, "url is 'ftp://host'"),
        ({"url": "http://"}, "url is 'http://'"),
        ({"url": "http://host:99999"}, "url is 'http://host:99999'"),
        ({"url": "http://host?a=b"}, "url is "),
        ({"url": "http://user:secret@host"}, "url holds a user or a password"),
        ({"clients": 0}, "clients is 0"),
        ({"requests": 0}, "requests is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"duration": 0.0}, "duration is 0.0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"speed": float("inf")}, "speed is inf"),
        ({"speed": 2.0}, "speed is 2.0; it applies to a trace file"),
        ({"trace": "poisson:3", "output_scale": 0.5}, "output_scale is 0.5; it applies to a trace file"),
        ({"trace": "burst:3"}, "trace is 'burst:3'"),
        ({"extra_body": "{"}, "extra_body is not JSON"),
        ({"extra_body": "[1]"}, r"extra_body is '\[1\]'; give an object"),
        ({"extra_body": '{"stream": true, "model": "a"}'}, "extra_body holds model, stream"),
        ({"slo": ("itl:3",)}, "slo 'itl:3' is unknown"),
        ({"slo": ("ttft:3",), "stream": False}, "slo has a limit for ttft or tpot"),
        ({"api_key": "a\nb"}, "api_key holds a character"),
    ],
)
def test_options_that_cannot_be_used_are_said_before_anything_is_sent(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        bench_serve(options(**changes))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("changes", [{"trace": "nowhere.csv.gz"}, {"prompts": Path("nowhere.jsonl")}])
def test_files_that_are_missing_are_said_before_anything_is_sent(changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="There is no file nowhere"):
        bench_serve(options(**changes))
