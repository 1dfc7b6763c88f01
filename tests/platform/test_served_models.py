"""Callers of an endpoint with several models and adapters, over HTTP in this process, with one engine behind all."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mars_ray.engine.process.async_engine import AsyncEngine
from mars_ray.engine.process.messages import EngineFacts
from mars_ray.engine.request import Request
from mars_ray.errors import UnavailableError
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.platform.gateway import Platform as Extension
from mars_ray.platform.models.manager import ApplicationState, ModelManager
from mars_ray.platform.models.registry import Directory, ServedModel
from mars_ray.platform.models.served_models import ServedModels
from mars_ray.platform.platform_config import AddedModel, PlatformConfig
from mars_ray.serve.http.endpoint import Endpoint
from mars_ray.serve.http.gateway_app import make_gateway_app
from mars_ray.serve.http.models import ModelClients
from mars_ray.serve.replicas.engine_client import LocalEngineClient, Take
from mars_ray.serve.replicas.engine_metrics import EngineMetrics
from mars_ray.storage.audit_log import AuditLog
from mars_ray.storage.document import FileDocument
from tests.platform.platform_samples import LocalResponseStore
from tests.serve.endpoint_samples import ANSWER, FOLDER, MESSAGES, LocalControl, config_of
from tests.serve.key_samples import add_key
from tests.serve.request_samples import LEAST as SMALLEST
from tests.serve.shared_tokenizer import sharing_tokenizer

LEAST = {path: {name: value for name, value in body.items() if name != "model"} for path, body in SMALLEST.items()}
"""The least that each route takes from a caller who names no model."""


class Applications:
    """Engines that start at once, unless they are held."""

    def __init__(self) -> None:
        self.running: dict[str, ApplicationState] = {}
        self.held = False

    def states(self) -> Mapping[str, ApplicationState]:
        return self.running

    def deploy(self, name: str, config: PlatformConfig, settings: AddedModel) -> None:
        self.running[name] = ApplicationState("deploying" if self.held else "running")

    def delete(self, name: str) -> None:
        del self.running[name]

    def set_adapters(self, name: str, adapters: Mapping[str, str]) -> None:
        pass


class Manager:
    """A `ModelsLink` to a manager in this process, which can be away."""

    def __init__(self, config: PlatformConfig, folder: Path) -> None:
        self.applications = Applications()
        self.core = ModelManager(config, FileDocument(folder / "models.json"), self.applications, AuditLog(None))
        self.away = False

    async def follow(self, gateway: str, revision: int) -> Directory | None:
        self._ask()
        self.core.step()
        return self.core.follow(gateway, revision)

    async def change(self, by: str, action: str, subject: str, method: str, *args: Any) -> None:
        self._ask()
        self.core.change(by, action, subject, method, *args)

    def _ask(self) -> None:
        if self.away:
            raise UnavailableError("the manager of models does not answer.")


class Client(LocalEngineClient):
    """A client that notes its requests. Its engine has not come up yet unless it is `up`."""

    def __init__(self, engine: AsyncEngine, info: ModelInfo) -> None:
        super().__init__(engine, info, EngineMetrics(model=info.name, replica="test"))
        self.asked: list[Request] = []
        self.up = True

    async def model_info(self) -> ModelInfo:
        if not self.up:
            raise UnavailableError("no engine is up.")
        return await super().model_info()

    async def obstacle(self) -> str | None:
        return await super().obstacle() if self.up else "no engine is up."

    async def generate(self, request: Request, take: Take, *, whole: bool = False) -> None:
        self.asked.append(request)
        await super().generate(request, take, whole=whole)


class Platform:
    """An endpoint with its manager, the clients of its engines by application, and a caller."""

    def __init__(self, manager: Manager, models: ServedModels, http: httpx2.AsyncClient) -> None:
        self.manager = manager
        self.models = models
        self.http = http
        self.clients: dict[str, Client] = {}

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not check():
                await asyncio.sleep(0.01)

    async def add(self, name: str, key: str = "", **fields: Any) -> httpx2.Response:
        body = {"name": name, "settings": {"model": "bundled"} | fields}
        return await self.http.post("/admin/models", json=body, headers=bearer(key))

    async def ask(self, model: str, key: str = "", **fields: Any) -> httpx2.Response:
        body = {"model": model, "messages": MESSAGES, "temperature": 0} | fields
        return await self.http.post("/v1/chat/completions", json=body, headers=bearer(key))

    async def names(self, key: str = "") -> list[str]:
        answer = await self.http.get("/v1/models", headers=bearer(key))
        return [model["id"] for model in answer.json()["data"]]

    def has_answered(self, application: str) -> bool:
        return application in self.clients and bool(self.clients[application].asked)

    async def until_offered(self, name: str) -> None:
        await self.until(lambda: name in self.models.names())


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """One event loop for all tests, because the engine that they share belongs to it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def engine(loop: asyncio.Runner) -> Iterator[tuple[AsyncEngine, EngineFacts]]:
    started = loop.run(AsyncEngine.start(config_of().engine_spec(FOLDER)))
    yield started
    loop.run(started[0].close())


Run = Callable[..., None]


@pytest.fixture
def run(loop: asyncio.Runner, engine: tuple[AsyncEngine, EngineFacts], tmp_path: Path) -> Run:
    """Run a function with a platform, whose settings may be given."""

    def run(work: Callable[[Platform], Awaitable[None]], **fields: Any) -> None:
        async def main() -> None:
            async with platform(*engine, tmp_path, **fields) as found:
                await work(found)

        loop.run(main())

    return run


@asynccontextmanager
async def platform(
    engine: AsyncEngine,
    facts: EngineFacts,
    folder: Path,
    *,
    away: bool = False,
    main_up: bool = True,
    live_adapters: tuple[str, ...] = (),
    **fields: Any,
) -> AsyncIterator[Platform]:
    """Unless `main_up`, no engine of the main model has come up. `live_adapters` are those that its engines have,
    whatever the config says."""
    config = config_of(**{"controller": "mars", "model_wait_s": 30} | fields)
    manager = Manager(config, folder)
    manager.away = away

    def clients(name: str, config: PlatformConfig) -> ModelClients:
        info = ModelInfo(name=config.model_name, created=1, engine=facts, served_names=config.served_model_names)
        if name == "main":
            info = replace(info, adapters=live_adapters)
        client = found.clients[name] = Client(engine, info)
        endpoint = sharing_tokenizer(Endpoint(client, config, FOLDER), config, FOLDER)
        return ModelClients(endpoint, LocalControl(config.plan(FOLDER)))

    async def make(model: ServedModel) -> ModelClients:
        return clients(model.application, model.config)

    found = Platform(manager, None, None)  # type: ignore[arg-type]  # set below
    models = ServedModels(
        clients("main", config),
        manager,
        make,
        gateway="test",
        wait_s=config.model_wait_s,
        access=config.access,
        adapters=config.adapters,
    )
    found.clients["main"].up = main_up
    platform = Extension(config, models, None, LocalResponseStore(folder / "responses"), name="test")
    app = make_gateway_app(models, config, name="test", extension=platform)
    async with (
        models.running(),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost") as http,
    ):
        found.models, found.http = models, http
        yield found


def test_a_model_of_the_config_answers_under_its_name_and_is_listed(run: Run) -> None:
    async def work(found: Platform) -> None:
        await found.until_offered("small")
        assert await found.names() == ["bundled", "small", "tiny"]
        for name in ("small", "tiny"):
            answer = (await found.ask(name)).json()
            assert (answer["model"], answer["choices"][0]["message"]["content"]) == (name, ANSWER)
        assert len(found.clients["mars-model-1"].asked) == 2 and not found.clients["main"].asked
        text = (await found.http.get("/metrics")).text
        assert 'vllm:request_success_total{finished_reason="stop",model_name="small"' in text

    run(work, models={"small": {"model": "bundled", "served_model_names": ["tiny"]}})


def test_every_route_finds_the_model_that_the_body_names(run: Run) -> None:
    async def work(found: Platform) -> None:
        await found.add("small")
        for path, body in LEAST.items():
            answer = await found.http.post(path, json=body | {"model": "small"})
            assert answer.status_code == 200, (path, answer.text)
            missing = await found.http.post(path, json=body | {"model": "smal"})
            assert missing.status_code == 404 and "'bundled', 'small'" in missing.text
        assert (await found.http.get("/v1/models/small")).json()["id"] == "small"
        assert not found.clients["main"].asked

    run(work)


def test_further_models_answer_and_are_listed_in_a_gateway_that_has_met_no_engine_of_the_main_model(run: Run) -> None:
    async def work(found: Platform) -> None:
        await found.until_offered("small")
        assert (await found.ask("small", max_tokens=1)).status_code == 200
        assert await found.names() == ["small"]
        for name in ("bundled", "gpt"):
            assert (await found.ask(name)).status_code == 503

    run(work, models={"small": {"model": "bundled"}}, served_model_names=["gpt"], main_up=False)


@pytest.mark.parametrize("unnamed", [{}, {"model": None}, {"model": ""}])
def test_a_request_that_names_no_model_is_answered_by_the_main_one(run: Run, unnamed: dict[str, Any]) -> None:
    async def work(found: Platform) -> None:
        await found.add("small")
        for path, body in LEAST.items():
            answer = await found.http.post(path, json=body | unnamed)
            assert answer.status_code == 200, (path, answer.text)
            if {"usage", "model"} & answer.json().keys():
                assert answer.json()["model"] == "bundled"
        assert len(found.clients["main"].asked) == 4

    run(work)


def test_an_account_without_access_to_the_main_model_must_name_one(run: Run, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    acme, other = (add_key(keys, name, "use", account=name) for name in ("acme", "other"))

    async def work(found: Platform) -> None:
        await found.until_offered("small")
        for path, body in LEAST.items():
            assert (await found.http.post(path, json=body, headers=bearer(acme))).status_code == 200
            refused = await found.http.post(path, json=body, headers=bearer(other))
            assert refused.status_code == 404 and "names no model" in refused.text
            assert "bundled" not in refused.text
        assert (await found.ask("small", other)).status_code == 200

    run(work, keys=str(keys), access={"bundled": ["acme"]}, models={"small": {"model": "bundled"}})


def test_a_private_main_model_is_private_before_the_manager_answers_and_under_its_further_names(
    run: Run, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.yaml"
    acme, other = (add_key(keys, name, "use", account=name) for name in ("acme", "other"))

    async def work(found: Platform) -> None:
        assert found.models.directory.revision == 0
        for name in ("bundled", "gpt"):
            assert (await found.ask(name, other, max_tokens=1)).status_code == 404
            assert (await found.ask(name, acme, max_tokens=1)).status_code == 200
        assert await found.names(other) == []

    run(work, keys=str(keys), access={"bundled": ["acme"]}, served_model_names=["gpt"])


def test_models_come_and_go_while_the_endpoint_runs(run: Run) -> None:
    async def work(found: Platform) -> None:
        added = (await found.add("small")).json()["data"]
        assert [(each["name"], each["version"]) for each in added] == [("bundled", None), ("small", 1)]
        assert (await found.ask("small")).status_code == 200
        assert (await found.http.delete("/admin/models/small")).status_code == 204
        await found.until(lambda: found.models.names() == ["bundled"])
        gone = await found.ask("small")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")

    run(work)


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"name": "small", "settings": {}}, 400, "settings: model"),
        ({"name": "small", "settings": {"model": "bundled", "mdoe": "ar"}}, 400, "mdoe"),
        ({"name": "../x", "settings": {"model": "bundled"}}, 400, "name"),
        ({"name": "bundled", "settings": {"model": "bundled"}}, 400, "main model"),
        ({"name": "small", "settings": {"model": "bundled"}, "canary": {"share": 0.1}}, 400, "canary"),
    ],
)
def test_a_bad_model_is_refused_in_one_line(run: Run, body: dict[str, Any], status: int, says: str) -> None:
    async def work(found: Platform) -> None:
        answer = await found.http.post("/admin/models", json=body)
        assert answer.status_code == status
        assert says in answer.json()["error"]["message"] + str(answer.json()["error"]["param"])
        assert len((await found.http.get("/admin/models")).json()["data"]) == 1

    run(work)


def test_a_change_that_cannot_be_stored_is_a_503_with_the_time_of_a_retry(run: Run, tmp_path: Path) -> None:
    async def work(found: Platform) -> None:
        document = tmp_path / "models.json"
        document.unlink()
        document.mkdir()
        refused = await found.add("small")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert int(refused.headers["retry-after"]) > 0

    run(work)


def test_a_request_waits_for_a_model_that_loads(run: Run) -> None:
    async def work(found: Platform) -> None:
        found.manager.applications.held = True
        await found.add("small")
        asked = asyncio.create_task(found.ask("small", max_tokens=1))
        await asyncio.sleep(0)
        found.manager.applications.running = {"mars-model-1": ApplicationState("running")}
        assert (await asked).status_code == 200

    run(work)


def test_a_model_that_loads_for_too_long_is_a_503(run: Run) -> None:
    async def work(found: Platform) -> None:
        found.manager.applications.held = True
        await found.add("small")
        late = await found.ask("small")
        assert (late.status_code, late.json()["error"]["code"]) == (503, "model_not_ready")
        assert int(late.headers["retry-after"]) > 0

    run(work, model_wait_s=0.1)


def test_a_new_version_takes_over_without_a_failed_request(run: Run) -> None:
    async def work(found: Platform) -> None:
        await found.add("small")
        await found.until_offered("small")
        statuses: list[int] = []
        swapped = asyncio.Event()

        async def caller() -> None:
            while not swapped.is_set():
                statuses.append((await found.ask("small", max_tokens=4)).status_code)

        callers = [asyncio.create_task(caller()) for _ in range(3)]
        for number in (2, 3, 4):
            await found.add("small", threshold=0.9 + number / 100)
            await found.until(partial(found.has_answered, f"mars-model-{number}"))
        swapped.set()
        await asyncio.gather(*callers)
        assert set(statuses) == {200}

    run(work)


def test_the_gateway_goes_on_while_the_manager_is_away_and_operators_are_told(run: Run) -> None:
    async def work(found: Platform) -> None:
        await found.add("small")
        await found.until_offered("small")
        found.manager.away = True
        assert (await found.ask("small")).status_code == 200
        assert (await found.add("other")).status_code == 503
        found.manager.away = False
        assert (await found.add("other")).status_code == 200

    run(work)


def test_a_gateway_that_has_just_started_calls_no_model_unknown(run: Run) -> None:
    async def work(found: Platform) -> None:
        found.models.directory = replace(found.models.directory, revision=0)  # as before its first look
        asked = asyncio.create_task(found.ask("small", max_tokens=1))
        await found.add("small")
        assert (await asked).status_code == 200

    run(work)


def test_a_gateway_that_has_just_started_keeps_adapters_private_that_were_added_at_run_time(
    run: Run, tmp_path: Path
) -> None:
    other = add_key(tmp_path / "keys.yaml", "other", "use", account="other")

    async def work(found: Platform) -> None:
        assert (await found.ask("terse", other)).status_code == 503
        found.models._set_adapters(found.models.directory)  # as when a further model starts before the main one's news
        assert (await found.ask("terse", other)).status_code == 503
        found.manager.away = False
        await found.until(lambda: found.models.directory.revision > 0)
        assert (await found.ask("terse", other)).status_code == 404

    run(work, keys=str(tmp_path / "keys.yaml"), model_wait_s=0.1, live_adapters=("terse",), away=True)


def test_a_gateway_that_has_just_started_keeps_adapters_of_the_config_private_that_have_become_so(
    run: Run, tmp_path: Path
) -> None:
    other = add_key(tmp_path / "keys.yaml", "other", "use", account="other")

    async def work(found: Platform) -> None:
        fields = ("bundled", "style", "smollm2", ("acme",))
        found.manager.core.change("key:root", "adapter.added", "style", "with_adapter", *fields)
        for early in (await found.ask("style", other), await found.http.get("/v1/models", headers=bearer(other))):
            assert (early.status_code, early.json()["error"]["code"]) == (503, "model_not_ready")
            assert int(early.headers["retry-after"]) > 0
        found.manager.away = False
        await found.until(lambda: found.models.directory.revision > 0)
        assert (await found.ask("style", other)).status_code == 404
        assert await found.names(other) == ["bundled"]
        assert not found.clients["main"].asked

    keys = str(tmp_path / "keys.yaml")
    run(work, keys=keys, model_wait_s=0.1, adapters={"style": "smollm2"}, away=True)


def test_the_main_model_answers_under_all_its_names_while_the_manager_is_away(run: Run) -> None:
    async def work(found: Platform) -> None:
        for name in ("bundled", "gpt"):
            assert (await found.ask(name, max_tokens=1)).status_code == 200

    run(work, served_model_names=["gpt"], model_wait_s=0.1, away=True)


def test_a_private_model_or_adapter_does_not_exist_for_other_accounts(run: Run, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    acme, other = (add_key(keys, name, "use", account=name) for name in ("acme", "other"))
    operator = add_key(keys, "root", "operate")

    async def work(found: Platform) -> None:
        await found.add("small", operator, access={"small": ["acme"]})
        await found.until_offered("small")
        adapter = {"name": "terse", "folder": "smollm2", "accounts": ["acme"]}
        headers = bearer(operator)
        assert (await found.http.post("/admin/adapters", json=adapter, headers=headers)).status_code == 200
        await found.until(lambda: found.models.main.adapters == ("terse",))
        assert await found.names(acme) == ["bundled", "terse", "small"]
        assert await found.names(other) == ["bundled"]
        assert (await found.ask("small", acme, max_tokens=1)).status_code == 200
        for name in ("small", "terse"):
            hidden = await found.ask(name, other)
            missing = await found.ask("never", other)
            assert hidden.status_code == missing.status_code == 404
            assert hidden.text.replace(name, "never") == missing.text
            assert (await found.http.get(f"/v1/models/{name}", headers=bearer(other))).status_code == 404
        for path in ("/admin/models", "/admin/adapters"):
            assert (await found.http.post(path, json=adapter, headers=bearer(acme))).status_code == 403
        assert (await found.http.delete("/admin/models/small", headers=bearer(acme))).status_code == 403

    run(work, keys=str(keys))


def test_each_model_has_its_own_controller_and_thresholds(run: Run) -> None:
    async def work(found: Platform) -> None:
        await found.add("small", threshold=0.97)
        await found.until_offered("small")
        for query, ceiling in (("", 1.0), ("?model=bundled", 1.0), ("?model=small", 0.97)):
            status = (await found.http.get(f"/control{query}")).json()
            assert {each["ceiling"] for each in status["classes"]} == {ceiling}
        body = {"model": "small", "threshold": 0.95}
        assert (await found.http.put("/control/threshold", json=body)).status_code == 204
        overrides = {
            query: [each["override"] for each in (await found.http.get(f"/control{query}")).json()["classes"]]
            for query in ("", "?model=small")
        }
        assert not any(overrides[""]) and all(overrides["?model=small"])
        assert (await found.http.get("/control?model=other")).status_code == 404

    run(work, threshold=1.0)
