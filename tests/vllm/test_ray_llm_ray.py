"""MARS in Ray's own LLM libraries: an app of Ray Serve LLM whose replicas a controller controls, and Ray Data LLM."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(3600)]

from tests.vllm.cluster_engines import VLLM_ARGS, cluster  # noqa: E402, I001

import psutil  # noqa: E402
import ray  # noqa: E402
import yaml  # noqa: E402
from openai import BadRequestError, InternalServerError, OpenAI  # noqa: E402
from ray import serve  # noqa: E402
from ray.data.llm import build_processor, vLLMEngineProcessorConfig  # noqa: E402
from ray.llm._internal.serve.engines.vllm.vllm_engine import _get_vllm_engine_config  # noqa: E402
from ray.serve.llm import LLMConfig, build_openai_app  # noqa: E402

from mars_ray import LLM, SamplingParams  # noqa: E402
from mars_ray.data.prompt_file import read_prompts  # noqa: E402
from mars_ray.load.plan import bundled_prompts  # noqa: E402
from mars_ray.model.resolve import resolve_model  # noqa: E402
from tests.vllm import chat_controller  # noqa: E402
from tests.vllm.chat_controller import CONTROL, call, controller, status  # noqa: E402

CONFIG = Path(__file__).parents[2] / "serve_configs" / "ray_serve_llm.yaml"
WITHIN_S = 900
until = partial(chat_controller.until, within_s=WITHIN_S)
QUESTIONS = [list(messages) for messages in read_prompts(bundled_prompts())[::40]]


def engine_kwargs(**mars: Any) -> dict[str, Any]:
    return VLLM_ARGS | {
        "dtype": "float32",
        "max_num_seqs": 4,
        "hf_overrides": {"architectures": ["MarsQwen2ForCausalLM"]},
        "additional_config": {"mars": mars},
    }


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM("bundled", dtype="float32", engine="mars") as llm:
        return [output.text for output in llm.chat(QUESTIONS, SamplingParams(max_tokens=24), mode="ar")]


@pytest.fixture(scope="module")
def on_a_cluster() -> Iterator[None]:
    with cluster(6):
        yield


def printed() -> dict[str, Any]:
    """Return the config of the model in serve_configs/ray_serve_llm.yaml."""
    [app] = yaml.safe_load(CONFIG.read_text())["applications"]
    [config] = app["args"]["llm_configs"]
    return dict(config)


def config_of(folder: Path, **mars: Any) -> LLMConfig:
    """Return the printed config for two replicas on CPUs."""
    config = printed()
    config["engine_kwargs"] |= engine_kwargs(**mars)
    changed = {
        "model_loading_config": {"model_id": "bundled", "model_source": str(folder)},
        "accelerator_config": {"kind": "cpu"},
        "deployment_config": {"num_replicas": 2},
    }
    return LLMConfig(**(config | changed))


def test_the_file_is_what_ray_serve_llm_takes() -> None:
    [app] = yaml.safe_load(CONFIG.read_text())["applications"]
    assert app["import_path"] == "ray.serve.llm:build_openai_app"
    [config] = app["args"]["llm_configs"]
    assert LLMConfig(**config).deployment_config["autoscaling_config"]["policy"]


@pytest.mark.parametrize(
    ("card", "mars", "line"),
    [
        (True, {"treshold": 0.9}, "treshold is not a setting; check its spelling"),
        (True, {"threshold": 2}, "additional_config mars: threshold"),
        (False, {}, "mars.json"),
    ],
    ids=["a misspelt key", "a wrong value", "no card"],
)
def test_what_is_wrong_at_the_start_is_said_in_one_line(
    tmp_path: Path, card: bool, mars: dict[str, Any], line: str
) -> None:
    folder = Path(shutil.copytree(resolve_model("bundled"), tmp_path / "model"))
    if not card:
        (folder / "mars.json").unlink()
    with pytest.raises(RuntimeError, match=line) as raised:
        _get_vllm_engine_config(config_of(folder, **mars))
    assert len(str(raised.value).splitlines()) == 1


@pytest.fixture(scope="module")
def client(on_a_cluster: None) -> OpenAI:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app_of(), name="llm")
    return OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def app_of(deployment: dict[str, Any] | None = None, **changed: Any) -> Any:
    config = config_of(resolve_model("bundled"), controller={"name": "chat", "floor": 0.5, "settings": CONTROL})
    config.engine_kwargs.update(changed)
    config.deployment_config = deployment or config.deployment_config
    return build_openai_app({"llm_configs": [config]})


def answer(client: OpenAI, messages: list[Any], **xargs: Any) -> str:
    completion = client.chat.completions.create(
        model="bundled", messages=messages, temperature=0, max_tokens=24, extra_body={"vllm_xargs": xargs}
    )
    return completion.choices[0].message.content or ""


def in_force() -> list[float]:
    """Return the thresholds that the replicas report, lowest first."""
    now = status()
    return sorted(replica.state.classes[0].threshold for replica in now.replicas) if now else []


def test_answers_are_those_of_one_token_at_a_time(client: OpenAI, expected: list[str]) -> None:
    assert [answer(client, messages, mode="exact") for messages in QUESTIONS] == expected


def test_a_wrong_threshold_is_refused(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="threshold is 7; it must be a number from 0 to 1"):
        answer(client, QUESTIONS[0], threshold=7)


def test_an_operator_sets_the_threshold_of_all_replicas(client: OpenAI) -> None:
    until(lambda: in_force() == [1.0, 1.0])
    call("set_threshold", 0.5, None, None)
    until(lambda: in_force() == [0.5, 0.5])
    call("clear_threshold", None)
    until(lambda: in_force() == [1.0, 1.0])


@contextmanager
def asking(callers: int, ask: Callable[[], object]) -> Iterator[None]:
    """Let callers ask again and again within the block."""
    stop = threading.Event()

    def again() -> None:
        while not stop.is_set():
            ask()

    threads = [threading.Thread(target=again) for _ in range(callers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_load_lowers_the_threshold_a_killed_replica_is_replaced_and_then_it_rises(client: OpenAI) -> None:
    callers, failed = 12, list[Exception]()

    def ask() -> None:
        try:
            answer(client, QUESTIONS[0])
        except InternalServerError as error:  # of the killed replica
            failed.append(error)

    with asking(callers, ask):
        until(lambda: in_force() and in_force()[-1] < 1.0)
        replicas = {replica.replica for replica in (status() or pytest.fail("no controller")).replicas}
        [killed, _] = [
            actor for actor in ray.util.list_named_actors(all_namespaces=True) if "MarsLLMServer" in actor["name"]
        ]
        ray.kill(ray.get_actor(killed["name"], namespace=killed["namespace"]))
        until(lambda: (now := status()) and {replica.replica for replica in now.replicas} - replicas)
    until(lambda: in_force() == [1.0, 1.0])
    assert len(failed) <= callers


def test_a_controller_that_is_killed_comes_back(client: OpenAI) -> None:
    call("set_threshold", 0.5, None, None)
    until(lambda: in_force() == [0.5, 0.5])
    killed = controller()
    ray.kill(killed)
    until(lambda: in_force() == [0.5, 0.5] and controller() != killed)
    assert answer(client, QUESTIONS[0])


def test_a_rolling_update_answers_every_caller(client: OpenAI) -> None:
    until(lambda: len(in_force()) == 2)
    before = {replica.replica for replica in (status() or pytest.fail("no controller")).replicas}
    callers, answered = 2, list[str]()
    with asking(callers, lambda: answered.append(answer(client, QUESTIONS[0]))):
        serve.run(app_of(max_num_seqs=3), name="llm")
        until(lambda: (now := status()) and not before & {replica.replica for replica in now.replicas})
        count = len(answered)
        until(lambda: len(answered) > count + callers)
    assert all(answered), "a failed request would have ended its caller"


def test_the_commands_show_and_set_the_threshold_on_the_cluster(client: OpenAI) -> None:
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}

    def command(*words: str, code: int = 0) -> str:
        program = [str(Path(sys.executable).with_name("mars-ray")), *words]
        done = subprocess.run(program, env=environment, text=True, capture_output=True)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    until(lambda: len(in_force()) == 2)
    assert "2 replicas" in command("status", "--controller", "chat")
    command("threshold", "set", "0.6", "--controller", "chat")
    until(lambda: in_force() == [0.6, 0.6])
    command("threshold", "clear", "--controller", "chat")
    until(lambda: in_force() == [1.0, 1.0])
    assert "the cluster has chat." in command("status", "--controller", "chats", code=2)


def test_the_printed_policy_starts_a_replica_under_load_and_stops_it_after(client: OpenAI) -> None:
    requests_alone_never_ask_for_one = {"target_ongoing_requests": 1000}
    soon = {"look_back_period_s": 11, "upscale_delay_s": 1, "downscale_delay_s": 60}
    scaling = printed()["deployment_config"]["autoscaling_config"]
    scaling |= requests_alone_never_ask_for_one | soon | {"min_replicas": 1, "max_replicas": 2}
    serve.run(app_of({"autoscaling_config": scaling}), name="llm")
    until(lambda: len(in_force()) == 1)
    with asking(12, lambda: answer(client, QUESTIONS[0])):
        until(lambda: len(in_force()) == 2)
    until(lambda: len(in_force()) == 1)


def test_ray_data_llm_answers_rows_by_their_own_threshold(on_a_cluster: None, expected: list[str]) -> None:
    serve.shutdown()
    rows = [
        {"number": number, "messages": messages, "threshold": threshold}
        for number, messages in enumerate(QUESTIONS)
        for threshold in (1.0, 0.5)
    ]
    answered = stage_of(max_tokens=24)(ray.data.from_items(rows)).take_all()
    assert len(answered) == len(rows)
    verified = {row["number"]: row["text"] for row in answered if row["threshold"] == 1.0}
    assert [verified[number] for number in range(len(QUESTIONS))] == expected


def test_ray_data_llm_answers_each_row_once_though_its_worker_is_killed(on_a_cluster: None) -> None:
    serve.shutdown()
    count = 500
    rows = [
        {"number": number, "messages": QUESTIONS[number % len(QUESTIONS)], "threshold": (1.0, 0.5)[number % 2]}
        for number in range(count)
    ]
    answered: list[dict[str, Any]] = []
    for row in stage_of(max_tokens=2)(ray.data.from_items(rows, override_num_blocks=20)).iter_rows():
        if not answered:
            [worker] = [
                each for each in psutil.Process().children(recursive=True) if "vLLMEngineStageUDF" in name_of(each)
            ]
            worker.kill()
        answered.append(row)
    assert sorted(row["number"] for row in answered) == list(range(count))
    assert all(row["text"] for row in answered)


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def stage_of(max_tokens: int) -> Any:
    """Return a stage of Ray Data LLM that answers rows at their own thresholds."""
    config = vLLMEngineProcessorConfig(
        model_source=str(resolve_model("bundled")),
        engine_kwargs=engine_kwargs(threshold=1.0),
        placement_group_config={"bundles": [{"CPU": 1}]},
        concurrency=1,
        batch_size=16,
    )
    return build_processor(
        config,
        preprocess=lambda row: {
            "messages": row["messages"],
            "sampling_params": {
                "temperature": 0,
                "max_tokens": max_tokens,
                "extra_args": {"threshold": float(row["threshold"])},
            },
        },
        postprocess=lambda row: {"number": row["number"], "threshold": row["threshold"], "text": row["generated_text"]},
    )
