"""The routes of the Responses API, over the endpoints that answer chat completions and a store of responses.

In:    request bodies; the models of a gateway; a `ResponseStoreClient`.
Out:   responses, complete or streamed; stored responses and their input items.
Never: shows a response to another account than its own; fails a finished answer because the store does not answer.
"""

import json
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Literal
from uuid import uuid4

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from mars_ray.chat.request_body import CALLS_MAX
from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.errors import RequestError, ResponseNotFoundError, UnavailableError
from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.api_error import ApiError, api_error
from mars_ray.openai_api.responses import ChatResponseBuilder, ResponseMetadata
from mars_ray.platform.models.served_models import ServedModels
from mars_ray.platform.responses.events import ResponseEvent, ResponseObject, ResponseObjectBuilder
from mars_ray.platform.responses.items import ItemPage, item_page, parsed_items, stored_items
from mars_ray.platform.responses.protocol import RESPONSES_PATH, Item, ItemReference, ResponsesRequest
from mars_ray.platform.responses.response_store import ResponseStoreClient, StoredResponse
from mars_ray.platform.responses.translate import chat_request_of, items_of, responses_error, stream_error
from mars_ray.serve.http.routes import STREAM
from mars_ray.serve.middleware.api_form import OPENAI, ApiForm
from mars_ray.serve.middleware.exchange import owner_of
from mars_ray.serve.middleware.json_body import JsonRoute

log = logging.getLogger(__name__)

RESPONSE_ID = re.compile("resp_[0-9a-f]{32}")
"""Id of a response, which the ids of its items contain."""

RESPONSES = ApiForm(translated=responses_error, error_event="error", stream_error=stream_error)


class DeletedResponse(BaseModel):
    """Response to the deletion of a stored response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def response_form(path: str) -> ApiForm:
    """Return the form of the API that a path of OpenAI's belongs to."""
    return RESPONSES if path == RESPONSES_PATH else OPENAI


def responses_routes(models: ServedModels, store: ResponseStoreClient) -> APIRouter:
    """Return the routes."""
    routes = APIRouter(route_class=JsonRoute, redirect_slashes=False)

    @routes.post(RESPONSES_PATH, response_model=ResponseObject, responses=STREAM)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        return await create_response(models, store, body, request)

    @routes.get(RESPONSES_PATH + "/{response_id}", response_model=ResponseObject)
    async def retrieve(response_id: str, request: Request, stream: bool = False) -> Response:
        if stream:
            raise ApiError.bad_request(
                "stream is not supported for stored responses; leave it out.", "stream", "unsupported_parameter"
            )
        return Response(await store.get(owner_of(request), response_id), media_type="application/json")

    @routes.delete(RESPONSES_PATH + "/{response_id}")
    async def delete(response_id: str, request: Request) -> DeletedResponse:
        await store.delete(owner_of(request), response_id)
        return DeletedResponse(id=response_id)

    @routes.get(RESPONSES_PATH + "/{response_id}/input_items")
    async def input_items(
        response_id: str,
        request: Request,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> ItemPage:
        turns = await store.chain(owner_of(request), response_id, 2 * models.main.limits.body_bytes)
        lists = [items for turn in turns for items in (turn.input, turn.output)]
        items = [item for part in lists[:-1] for item in json.loads(part)]
        return item_page(items, limit=limit, order=order, after=after)

    return routes


async def create_response(
    models: ServedModels, store: ResponseStoreClient, body: ResponsesRequest, http: Request
) -> Response:
    """Answer a request, and store the response unless the request declines. Raises `ApiError` and `MarsRayError`."""
    owner = owner_of(http)
    endpoint = await models.find(body.model, owner)
    body = await _resolved(store, owner, body, endpoint.limits.body_bytes)
    before = await _conversation(store, owner, body, endpoint.limits.body_bytes)
    # A random id, because callers choose the id of the request and another caller must not guess this one.
    id = f"resp_{uuid4().hex}"

    def builder(metadata: ResponseMetadata, plan: AnswerPlan, _prompt: Sequence[int]) -> ResponseObjectBuilder:
        return ResponseObjectBuilder(ChatResponseBuilder(metadata, plan), metadata, body)

    keep = partial(_keep, store, owner, body) if body.store else None
    try:
        return await endpoint.converse(chat_request_of(body, before), http, id, builder, keep)
    except ApiError as error:
        raise responses_error(error) from error
    except RequestError as error:
        raise responses_error(api_error(error)) from error


async def _resolved(store: ResponseStoreClient, owner: str, body: ResponsesRequest, max_bytes: int) -> ResponsesRequest:
    """Return a request with the stored items in place of the references to them. Raises an `ApiError` for an item that
    is not stored, and if the responses that hold the items are larger than `max_bytes` together."""
    items = list(items_of(body))
    if not any(isinstance(item, ItemReference) for item in items):
        return body
    stored_by_id: dict[str, Item] = {}
    read = set[str]()
    size = 0
    for index, item in enumerate(items):
        if not isinstance(item, ItemReference):
            continue
        response = RESPONSE_ID.search(item.id)
        if response and response[0] not in read:
            read.add(response[0])
            with suppress(ResponseNotFoundError):
                stored = await store.get(owner, response[0])
                size += len(stored)
                output = json.loads(stored)["output"]
                ids = (fields["id"] for fields in output)
                stored_by_id |= zip(ids, parsed_items(json.dumps(output)), strict=True)
        if size > max_bytes:
            raise ApiError.bad_request("the items that input refers to are too large; send fewer.", "input")
        if item.id not in stored_by_id:
            raise ApiError(
                404, f"Item with id {item.id[:NAME_CHARS]!r} not found.", type="invalid_request_error", param="input"
            )
        items[index] = stored_by_id[item.id]
    return body.model_copy(update={"input": items})


async def _conversation(store: ResponseStoreClient, owner: str, body: ResponsesRequest, max_bytes: int) -> list[Item]:
    """Return the items before the input of a request. Raises an `ApiError` if its previous response is not usable."""
    if body.previous_response_id is None:
        return []
    field = "previous_response_id"
    try:
        turns = await store.chain(owner, body.previous_response_id, max_bytes)
    except RequestError as error:
        code = "previous_response_not_found" if isinstance(error, ResponseNotFoundError) else None
        raise ApiError.bad_request(str(error), field, code) from None
    items = [item for turn in turns for part in (turn.input, turn.output) for item in parsed_items(part)]
    if (count := len(items) + len(items_of(body))) > CALLS_MAX:
        raise ApiError.bad_request(
            f"the conversation has {count} items; it may have up to {CALLS_MAX}. Start a new one with the items that "
            "matter in input.",
            field,
        )
    return items


async def _keep(store: ResponseStoreClient, owner: str, body: ResponsesRequest, sent: BaseModel) -> None:
    """Store the response that `sent` is or holds, if any, and set its field `store` to whether that worked."""
    response = sent.response if isinstance(sent, ResponseEvent) else sent
    if not isinstance(response, ResponseObject):
        return
    stored = StoredResponse(
        id=response.id,
        previous=response.previous_response_id,
        input=json.dumps(stored_items(items_of(body), response.id), ensure_ascii=False),
        response=response.model_dump_json(exclude_unset=True),
    )
    try:
        response.store = await store.put(owner, stored)
    except UnavailableError as error:
        log.warning("response %s was not stored: %s", response.id, error)
        response.store = False
