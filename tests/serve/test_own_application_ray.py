"""Our model in Serve applications of somebody's own: mounted beside theirs, and called by handle from within."""

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any

import openai
import pytest
import ray
import ray.data
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from mars_ray.errors import RequestError
from mars_ray.ray_data import EndpointProcessorConfig, build_processor
from mars_ray.ray_serve import MountedApp, build_deployment, build_openai_app
from mars_ray.serve.deploy.environment import free_ports
from tests.serve.cluster_samples import STEP_SECONDS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("cluster")]
ROOM = 1
"""Of the endpoint under a prefix: a block of a stage is more, however fast the engine is."""
SETTINGS = {
    "engine": {"max_num_seqs": 8},
    "limits": {"requests_per_key": ROOM},
    "threshold": 0.9,
}
SMALL = {
    "name": "small",
    "controller": "shops",
    "engine": {"max_num_seqs": 2, "max_waiting_seqs": 2},
    "threshold": 0.5,
}
QUESTION = [{"role": "user", "content": "Ann, Bob: put them in a numbered list."}]
LOSSLESS = {"threshold": 1}
"""Below it, how far an engine looks ahead depends on its load, and words on that."""
HELD = re.compile(r"^vllm:num_requests_(running|waiting)\{.*\} (\S+)$", re.MULTILINE)
LIST = r"1\. \w+\n2\. \w+"
shop = FastAPI()
shop.mount("/large", MountedApp(partial(serve.get_app_handle, "llm")))
shop.mount("/small", MountedApp(partial(serve.get_deployment_handle, "SmallChat")))
shop.mount("/none", MountedApp(partial(serve.get_app_handle, "none")))


@serve.deployment(ray_actor_options={"num_cpus": 0})
@serve.ingress(shop)
class Shop:
    """A FastAPI application of somebody's: a route that asks a model, and endpoints of two models."""

    def __init__(self, model: DeploymentHandle) -> None:
        self._model = model

    @shop.get("/list")
    async def list(self, names: str) -> dict[str, Any]:
        asked = [{"role": "user", "content": f"{names}: put them in a numbered list."}]
        chunks = self._model.options(stream=True).chat.remote(asked, temperature=0, threshold=1)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]
        whole = await self._model.complete.remote(asked, temperature=0, threshold=1)
        return {"streamed": "".join(pieces), "whole": whole.choices[0].message.content, "pieces": len(pieces)}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve, as a program of somebody's starts it."""
    port = next(free_ports())
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.fixture(scope="module")
def mounted(url: str) -> Iterator[str]:
    """The endpoint under a prefix, with an engine that leaves room on the cluster."""
    serve.run(build_openai_app(SETTINGS), name="llm", route_prefix="/llm")
    yield f"{url}/llm/v1"
    serve.delete("llm")


def test_openais_client_talks_to_an_endpoint_under_a_prefix(mounted: str) -> None:
    client = openai.OpenAI(base_url=mounted, api_key="none", max_retries=0)
    assert [each.id for each in client.models.list()] == ["bundled"]
    asked: Any = {"model": "bundled", "messages": QUESTION, "temperature": 0, "extra_body": LOSSLESS}
    answer = client.chat.completions.create(**asked)
    assert re.fullmatch(LIST, answer.choices[0].message.content or "")


@pytest.mark.parametrize("where", ["url", "app"])
def test_a_stage_asks_an_endpoint_and_starts_no_engine(mounted: str, where: str) -> None:
    config = EndpointProcessorConfig(
        **{"url": mounted} if where == "url" else {"app": "llm"},  # type: ignore[arg-type]
        # Long enough for those behind it to come while the first one runs, on any machine.
        sampling={"max_tokens": 128, "temperature": 0, "ignore_eos": True},
        threshold=1,
        batch_size=8,
        should_continue_on_error=True,
    )
    stage = build_processor(config, postprocess=lambda row: {"n": row["n"], "text": row["text"], "error": None})
    rows = [{"n": n, "messages": QUESTION} for n in range(30)]
    rows.append({"n": 30, "messages": QUESTION, "sampling": {"max_tokens": 0}})
    found = {row["n"]: row for row in stage(ray.data.from_items(rows)).take_all()}
    assert sorted(found) == list(range(31))
    [text] = {found[n]["text"] for n in range(30)}
    assert re.match(LIST, text)
    assert "max_tokens" in found[30]["error"] and "Traceback" not in found[30]["error"]


def test_what_was_refused_for_now_was_asked_again(mounted: str) -> None:
    with urllib.request.urlopen(f"{mounted.removesuffix('/v1')}/metrics", timeout=60) as page:
        refused = re.findall(r'^mars:http_requests_total.*status="429".* (\S+)$', page.read().decode(), re.MULTILINE)
    assert sum(map(float, refused)) > 0


@pytest.fixture(scope="module")
def shops(url: str, mounted: str) -> Iterator[str]:
    """Somebody's application, with a model of its own beside the endpoint."""
    app = Shop.bind(build_deployment(SMALL, name_prefix="Small"))  # type: ignore[attr-defined]  # what the decorator makes of it
    serve.run(app, name="shop", route_prefix="/shop")
    yield f"{url}/shop"
    serve.delete("shop")


def test_an_application_of_somebodys_asks_a_model_by_handle(shops: str) -> None:
    with urllib.request.urlopen(f"{shops}/list?names=Ann,%20Bob", timeout=120) as answer:
        found = json.load(answer)
    assert found["streamed"] == found["whole"] and re.fullmatch(LIST, found["whole"])
    assert found["pieces"] > 1
    model = serve.get_deployment_handle("SmallChat", app_name="shop")
    with pytest.raises(RequestError, match="threshold"):
        model.complete.remote(QUESTION, threshold=7).result()


def deep_schema() -> dict[str, Any]:
    """A schema with more levels than a body of the HTTP API may have."""
    schema: dict[str, Any] = {}
    for _ in range(250):
        schema = {"properties": schema}
    return schema


@pytest.mark.parametrize(
    ("content", "schema", "said"),
    [
        ("a\ud800", {}, r"messages\.0\.content holds \\ud800, which is only half of a surrogate pair"),
        ("a", deep_schema(), "the request is nested more than 200 levels deep"),
    ],
    ids=["surrogate", "nesting"],
)
def test_a_call_by_handle_is_refused_for_values_that_a_body_may_not_hold(
    shops: str, content: str, schema: dict[str, Any], said: str
) -> None:
    model = serve.get_deployment_handle("SmallChat", app_name="shop")
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}]
    with pytest.raises(RequestError, match=said):
        model.complete.remote([{"role": "user", "content": content}], tools=tools).result()


@pytest.mark.parametrize(("prefix", "name"), [("large", "bundled"), ("small", "small")])
def test_openais_client_talks_to_an_endpoint_mounted_in_somebodys_fastapi(shops: str, prefix: str, name: str) -> None:
    client = openai.OpenAI(base_url=f"{shops}/{prefix}/v1", api_key="none", max_retries=0)
    assert [each.id for each in client.models.list()] == [name]
    asked: Any = {"model": name, "messages": QUESTION, "temperature": 0, "extra_body": LOSSLESS}
    answer = client.chat.completions.with_raw_response.create(**asked)
    assert re.fullmatch(LIST, answer.parse().choices[0].message.content or "")
    assert len(answer.headers.get_list("x-request-id")) == 1
    chunks = client.chat.completions.create(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.parse().choices[0].message.content
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(**asked | {"model": "other"})


def test_a_mounted_model_that_is_not_there_is_a_503(shops: str) -> None:
    client = openai.OpenAI(base_url=f"{shops}/none/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.InternalServerError) as refused:
        client.models.list()
    assert (refused.value.status_code, refused.value.code) == (503, "unavailable")


def test_models_side_by_side_have_controllers_of_their_own(shops: str) -> None:
    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    found = {name.split(":")[1] for name in names if name.startswith("controller:")}
    # That of a job which ran on this cluster before may be there a little longer than its job.
    assert {"llm", "shops"} <= found


def test_an_engine_that_is_full_still_says_that_it_is_there(shops: str) -> None:
    model, engine = (serve.get_deployment_handle(name, app_name="shop") for name in ("SmallChat", "SmallEngine"))
    asked: list[DeploymentResponse[Any]] = []
    try:
        ends_s = time.monotonic() + STEP_SECONDS
        while held(engine) != {"running": "2.0", "waiting": "1.0"}:  # a class may have half of the places that wait
            assert time.monotonic() < ends_s, "it was never full"
            # Several at a time, as a fast machine answers some of them before it is asked for what it holds.
            asked += [model.complete.remote(QUESTION, max_tokens=1500, ignore_eos=True, mode="ar") for _ in range(4)]
    finally:
        for each in asked:
            each.cancel()


def held(engine: DeploymentHandle) -> dict[str, str]:
    """How many sequences run and wait, by what the engine answers when it is asked."""
    return dict(HELD.findall(engine.metrics.remote().result(timeout_s=STEP_SECONDS)))
