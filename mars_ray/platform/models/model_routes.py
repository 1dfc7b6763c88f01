"""Routes for operators below `/admin/models`: the models and adapters of an endpoint at run time.

In:    the models of a gateway.
Out:   routes. The access middleware allows them only for callers with the role `operate`.
Never: returns before a change is stored. Engines start and end afterwards.
"""

import json
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from mars_ray.chat.request_body import Items, RequestBody
from mars_ray.errors import ConfigError, DataError, InputError, OutputError, UnknownNameError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.platform.accounts.admin_routes import store_error
from mars_ray.platform.models.registry import NAME, Directory, ModelState
from mars_ray.platform.models.served_models import ServedModels
from mars_ray.platform.platform_config import AddedModel
from mars_ray.serve.deploy.serve_config import parse_config
from mars_ray.serve.middleware.exchange import Exchange
from mars_ray.serve.middleware.json_body import JsonRoute

SETTINGS_BYTES = 64 << 10


class ModelRequest(RequestBody):
    """Body of `POST /admin/models`: a new model, or a new version of one."""

    name: str = Field(pattern=NAME)
    settings: dict[str, Any]
    """The fields of an entry of `models` in a config file."""


class AdapterRequest(RequestBody):
    """Body of `POST /admin/adapters`: a new adapter, or a new folder for one."""

    name: str = Field(pattern=NAME)
    model: str | None = None
    """Model that the adapter was trained for; None means the main model."""
    folder: str
    """Folder, URL or name on a hub, as for `adapters` in a config file."""
    accounts: Items[str] | None = None
    """Accounts that may use the adapter; None means all. For others it does not exist."""


class ModelObject(BaseModel):
    """A model as operators see it."""

    object: Literal["model"] = "model"
    name: str
    state: ModelState
    reason: str = ""
    """Why the model is not ready, or what became of its last new version."""
    version: int | None = None
    """Number of the present version; None for the main model, whose versions are deployments."""
    new_version: int | None = None
    """Number of the version that starts and then takes over."""
    served_names: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    access: dict[str, tuple[str, ...]] = {}
    """Accounts that may use the model or one of its adapters, by name, where not all may."""


class ModelObjectList(BaseModel):
    """Response of `GET /admin/models`, the main model first."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


def model_routes(models: ServedModels) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(prefix="/admin", route_class=JsonRoute, redirect_slashes=False)

    async def change(request: Request, action: str, subject: str, method: str, *args: Any) -> None:
        if models.link is None:
            message = "This endpoint has one model only: its application has no deployment `Models`."
            raise ApiError(404, message, type="invalid_request_error", code="no_models")
        by = Exchange.of(request.scope).operator
        try:
            await models.link.change(by, action, subject, method, *args)
        except UnknownNameError as error:
            raise ApiError(404, str(error), type="invalid_request_error", code="model_not_found") from None
        except (DataError, OutputError) as error:
            raise store_error(error) from None
        except InputError as error:
            raise ApiError.bad_request(str(error)) from None

    @routes.get("/models")
    async def list_models() -> ModelObjectList:
        """Return the models and adapters, with their states."""
        if models.link:
            await models.refresh()
        return await _list(models)

    @routes.post("/models")
    async def add_model(body: ModelRequest, request: Request) -> ModelObjectList:
        """Add a model, or a new version of one."""
        settings = _settings(body)
        await change(request, "model.added", body.name, "with_model", body.name, settings)
        return await list_models()

    @routes.post("/adapters")
    async def add_adapter(body: AdapterRequest, request: Request) -> ModelObjectList:
        """Add an adapter, or replace its folder. Engines load it while they run."""
        model = body.model or models.main.name
        accounts = None if body.accounts is None else tuple(body.accounts)
        fields = (model, body.name, body.folder, accounts)
        await change(request, "adapter.added", body.name, "with_adapter", *fields)
        return await list_models()

    @routes.delete("/models/{name:path}", status_code=204)
    async def remove(name: str, request: Request) -> Response:
        """Remove a model or an adapter. Requests that run may finish."""
        await change(request, "model.removed", name, "without", name)
        await models.refresh()  # a caller of this gateway sees the change at once
        return Response(status_code=204)

    return routes


def _settings(body: ModelRequest) -> AddedModel:
    if (size := len(json.dumps(body.settings))) > SETTINGS_BYTES:  # each wrong value in them would become an error
        message = f"settings take {size} bytes as JSON; they may take {SETTINGS_BYTES}."
        raise ApiError.bad_request(message, "settings")
    try:
        return parse_config(AddedModel, body.settings, "settings")
    except ConfigError as error:
        raise ApiError.bad_request(str(error), "settings") from None


async def _list(models: ServedModels) -> ModelObjectList:
    directory = models.directory
    ready = not await models.main.client.obstacle()
    main = ModelObject(
        name=models.main.name,
        state="ready" if ready else "loading",
        served_names=(await models.main.model_info()).served_names if ready else (),
        **_adapters(directory, models.main.name),
    )
    others = [
        ModelObject(
            name=model.name,
            # This gateway may still have to get ready for it.
            state="loading" if model.state == "ready" and model.name not in models.names() else model.state,
            reason=model.reason,
            version=model.number,
            new_version=model.new_number,
            served_names=model.served_names,
            **_adapters(directory, model.name),
        )
        for model in directory.models
    ]
    return ModelObjectList(data=[main, *others])


def _adapters(directory: Directory, name: str) -> dict[str, Any]:
    adapters = directory.adapters.get(name, ())
    access = {used: directory.access[used] for used in (name, *adapters) if used in directory.access}
    return {"adapters": adapters, "access": access}
