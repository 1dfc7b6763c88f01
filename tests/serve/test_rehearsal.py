"""An endpoint whose engine rehearses another machine says so wherever it gives a figure."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import openai
import pytest
import yaml

from mars_ray.errors import ConfigError
from mars_ray.installed import settings_class
from mars_ray.load.bench_serve import LoadOptions, bench_serve
from mars_ray.machines.registry import step_model
from mars_ray.serve.deploy.deploy_file import read_deploy_file
from mars_ray.serve.deploy.serve_config import parse_config
from tests.samples import Cli
from tests.serve.endpoint_clients import http, settled
from tests.serve.endpoint_samples import MESSAGES, Served, config_of, served

MACHINE = "h200/qwen2.5-7b/vllm"
WORDS = f"modelled step time: {MACHINE}"
ASK = {"model": "bundled", "messages": MESSAGES, "max_tokens": 8}


@pytest.fixture(scope="module")
def rehearsed() -> Iterator[Served]:
    with served(config_of(engine={"rehearse": MACHINE})) as endpoint:
        yield endpoint


@pytest.fixture
def client(rehearsed: Served) -> Iterator[httpx2.Client]:
    settled(rehearsed)
    with http(rehearsed) as plain:
        yield plain


@pytest.mark.parametrize("stream", [False, True])
def test_a_header_of_each_answer_says_so(client: httpx2.Client, stream: bool) -> None:
    answer = client.post("/v1/chat/completions", json=ASK | {"stream": stream})
    assert (answer.status_code, answer.headers["x-mars-notice"]) == (200, WORDS)


def test_the_model_list_says_so(rehearsed: Served) -> None:
    [model] = openai.OpenAI(base_url=f"{rehearsed.url}/v1", api_key="none").models.list()
    assert model.to_dict()["notice"] == WORDS


def test_the_metrics_count_slow_steps_by_machine(client: httpx2.Client) -> None:
    lines = client.get("/metrics").text.splitlines()
    [line] = [line for line in lines if line.startswith("mars:rehearsal_slow_steps{")]
    assert f'machine="{MACHINE}"' in line and float(line.split()[-1]) >= 0


def test_the_controller_the_live_view_and_the_command_line_say_so(
    rehearsed: Served, client: httpx2.Client, mars_ray: Cli
) -> None:
    client.post("/v1/chat/completions", json=ASK).raise_for_status()
    rehearsed.beat()
    assert client.get("/control").json()["notice"].startswith(WORDS)
    assert rehearsed.run(rehearsed.control.live("", 0)).status.notice.startswith(WORDS)
    code, shown, said = mars_ray("status", "--once", "--url", rehearsed.url)
    assert code == 0, said
    assert WORDS in shown and "steps were slower here" in shown


def test_a_load_generator_passes_the_words_on(rehearsed: Served, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench_serve(LoadOptions(url=rehearsed.url, requests=2, max_tokens=4))
    assert report["notice"] == WORDS
    assert WORDS in capsys.readouterr().out


def test_an_endpoint_at_the_speed_of_this_machine_says_nothing(endpoint: Served) -> None:
    settled(endpoint)
    with http(endpoint) as plain:
        assert "x-mars-notice" not in plain.post("/v1/chat/completions", json=ASK).headers
        assert "notice" not in plain.get("/v1/models").json()["data"][0]
        assert "mars:rehearsal_slow_steps{" not in plain.get("/metrics").text


# Settings


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(machine: str) -> Path:
        path = tmp_path / "deploy.yaml"
        path.write_text(yaml.safe_dump({"applications": [{"args": {"engine": {"rehearse": machine}}}]}))
        return path

    return write


def test_an_unknown_machine_in_a_file_is_refused_in_one_line_with_its_place(written: Callable[[str], Path]) -> None:
    path = written("h300/qwen2.5-7b")
    with pytest.raises(ConfigError) as refused:
        read_deploy_file(settings_class(), path)
    message = str(refused.value)
    assert message.startswith(f"{path}: applications[0].args.engine.rehearse: ")
    assert "'h300/qwen2.5-7b'" in message and "h200" in message and "\n" not in message


def test_the_command_line_names_a_machine(mars_ray: Cli) -> None:
    fields = read_deploy_file(settings_class(), None, engine={"rehearse": MACHINE})
    assert parse_config(settings_class(), fields["applications"][0]["args"]).engine.rehearse == MACHINE
    code, _, said = mars_ray("serve", "--rehearse", "h300/qwen2.5-7b")
    assert code == 2
    assert "h300/qwen2.5-7b" in said and said.count("\n") == 1


def test_the_file_for_rehearsals_has_a_class_that_load_lowers() -> None:
    path = Path(__file__).parents[2] / "serve_configs" / "rehearsal.yaml"
    config = parse_config(settings_class(), read_deploy_file(settings_class(), path)["applications"][0]["args"])
    assert config.engine.rehearse and step_model(config.engine.rehearse).max_kv_tokens > 0
    [service_class] = config.classes
    assert service_class.floor and service_class.floor < config.threshold
