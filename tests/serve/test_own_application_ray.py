"""Our model in Serve applications of somebody's own: mounted beside theirs, and called by handle from within."""

import json
import re
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import ray
import ray.data
from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from mars_ray.errors import RequestError
from mars_ray.ray_data import EndpointProcessorConfig, build_processor
from mars_ray.ray_serve import build_deployment, build_openai_app
from mars_ray.serve.deploy.environment import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]
SETTINGS = {"engine": {"compiled": False, "max_num_seqs": 8}, "threshold": 0.9}
QUESTION = [{"role": "user", "content": "Ann, Bob: put them in a numbered list."}]
LIST = r"1\. \w+\n2\. \w+"
shop = FastAPI()


@serve.deployment(ray_actor_options={"num_cpus": 0})
@serve.ingress(shop)
class Shop:
    """A FastAPI application of somebody's, with a route that asks the model."""

    def __init__(self, model: DeploymentHandle) -> None:
        self._model = model

    @shop.get("/list")
    async def list(self, names: str) -> dict[str, Any]:
        asked = [{"role": "user", "content": f"{names}: put them in a numbered list."}]
        chunks = self._model.options(stream=True).chat.remote(asked, temperature=0, threshold=0.9)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices]
        whole = await self._model.complete.remote(asked, temperature=0, threshold=0.9)
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
    answer = client.chat.completions.create(model="bundled", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
    assert re.fullmatch(LIST, answer.choices[0].message.content or "")


@pytest.mark.parametrize("where", ["url", "app"])
def test_a_stage_asks_an_endpoint_and_starts_no_engine(mounted: str, where: str) -> None:
    config = EndpointProcessorConfig(
        **{"url": mounted} if where == "url" else {"app": "llm"},  # type: ignore[arg-type]
        sampling={"max_tokens": 16, "temperature": 0},
        threshold=0.9,
        batch_size=8,
        should_continue_on_error=True,
    )
    stage = build_processor(config, postprocess=lambda row: {"n": row["n"], "text": row["text"], "error": None})
    rows = [{"n": n, "messages": QUESTION} for n in range(20)]
    rows.append({"n": 20, "messages": QUESTION, "sampling": {"max_tokens": 0}})
    found = {row["n"]: row for row in stage(ray.data.from_items(rows)).take_all()}
    assert sorted(found) == list(range(21))
    [text] = {found[n]["text"] for n in range(20)}
    assert re.fullmatch(LIST, text)
    assert "max_tokens" in found[20]["error"] and "Traceback" not in found[20]["error"]


def test_an_application_of_somebodys_asks_a_model_by_handle(url: str) -> None:
    app = Shop.bind(build_deployment(SETTINGS))  # type: ignore[attr-defined]  # what the decorator makes of it
    serve.run(app, name="shop", route_prefix="/shop")
    try:
        with urllib.request.urlopen(f"{url}/shop/list?names=Ann,%20Bob", timeout=120) as answer:
            found = json.load(answer)
        assert found["streamed"] == found["whole"] and re.fullmatch(LIST, found["whole"])
        assert found["pieces"] > 1
        model = serve.get_deployment_handle("Chat", app_name="shop")
        with pytest.raises(RequestError, match="threshold"):
            model.complete.remote(QUESTION, threshold=7).result()
    finally:
        serve.delete("shop")
