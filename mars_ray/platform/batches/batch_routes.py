"""The routes of files and batches, over stores in a folder or an object store.

In:    forms and request bodies; a `FileStore` and a `BatchStore`.
Out:   OpenAI's objects, lists, and the content of files.
Never: shows a file or a batch to another owner than its own; blocks the event loop while the storage answers.
"""

import asyncio
import re
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from openai.types.batch import Batch
from openai.types.file_deleted import FileDeleted
from openai.types.file_object import FileObject
from pydantic import ValidationError
from starlette.responses import Response, StreamingResponse

from mars_ray.chat.validation_errors import NAME_CHARS, validation_error
from mars_ray.errors import FileInUseError
from mars_ray.openai_api.api_error import ApiError
from mars_ray.platform.batches.batch_store import Stores
from mars_ray.platform.batches.file_store import FileStore
from mars_ray.platform.batches.protocol import BatchRequest, ExpiresAfter, ObjectPage
from mars_ray.platform.batches.upload import FormReader, UploadedForm
from mars_ray.serve.middleware.exchange import Exchange, owner_of
from mars_ray.serve.middleware.json_body import JsonRoute

NO_STORAGE = "this endpoint stores no files and batches: its setting storage names no folder or object store."
FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2592000},
                    },
                    "required": ["file", "purpose"],
                }
            }
        },
    }
}
_EXPIRES_AFTER = re.compile(r"expires_after\[(anchor|seconds)\]")

Limit = Annotated[int, Query(ge=1, le=100)]
FileLimit = Annotated[int, Query(ge=1, le=10_000)]


def batch_routes(stores: Stores | None) -> APIRouter:
    """Return the routes. Without stores, each answers an error that names the setting."""
    routes = APIRouter(route_class=JsonRoute, redirect_slashes=False)
    _add_file_routes(routes, stores)
    _add_batch_routes(routes, stores)
    return routes


def _add_file_routes(routes: APIRouter, stores: Stores | None) -> None:
    @routes.post("/v1/files", openapi_extra=FORM)
    async def upload(request: Request) -> FileObject:
        return await _upload(_needed(stores).files, request)

    @routes.get("/v1/files")
    async def list_files(
        request: Request,
        after: str | None = None,
        limit: FileLimit = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> ObjectPage[FileObject]:
        files = _needed(stores).files
        return await asyncio.to_thread(
            files.page, owner_of(request), after=after, limit=limit, order=order, purpose=purpose
        )

    @routes.get("/v1/files/{file_id}")
    async def get_file(file_id: str, request: Request) -> FileObject:
        return await asyncio.to_thread(_needed(stores).files.get, owner_of(request), file_id)

    @routes.get("/v1/files/{file_id}/content", response_class=Response)
    async def content(file_id: str, request: Request) -> Response:
        chunks = await asyncio.to_thread(_needed(stores).files.content, owner_of(request), file_id)
        return StreamingResponse(chunks, media_type="application/octet-stream")

    @routes.delete("/v1/files/{file_id}")
    async def delete_file(file_id: str, request: Request) -> FileDeleted:
        await asyncio.to_thread(_delete, _needed(stores), owner_of(request), file_id)
        return FileDeleted(id=file_id, object="file", deleted=True)


def _add_batch_routes(routes: APIRouter, stores: Stores | None) -> None:
    @routes.post("/v1/batches")
    async def create(body: BatchRequest, request: Request) -> Batch:
        exchange = Exchange.of(request.scope)
        return await asyncio.to_thread(_needed(stores).batches.create, exchange.owner, exchange.key or "", body)

    @routes.get("/v1/batches")
    async def list_batches(request: Request, after: str | None = None, limit: Limit = 20) -> ObjectPage[Batch]:
        return await asyncio.to_thread(_needed(stores).batches.page, owner_of(request), after=after, limit=limit)

    @routes.get("/v1/batches/{batch_id}")
    async def get_batch(batch_id: str, request: Request) -> Batch:
        return await asyncio.to_thread(_needed(stores).batches.get, owner_of(request), batch_id)

    @routes.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str, request: Request) -> Batch:
        return await asyncio.to_thread(_needed(stores).batches.cancel, owner_of(request), batch_id)


async def _upload(files: FileStore, request: Request) -> FileObject:
    owner = owner_of(request)
    reader = FormReader(request, lambda: files.new_upload(owner))
    form = await reader.read()
    try:
        expires_after_s = _checked(form)
        return await asyncio.to_thread(form.file.finish, form.filename, "batch", expires_after_s)
    except BaseException:
        await reader.discard()
        raise


def _checked(form: UploadedForm) -> int | None:
    """Return the seconds after which a file expires. Raises an `ApiError` for a field that is unknown or wrong."""
    expires: dict[str, Any] = {}
    for name, value in form.fields.items():
        if match := _EXPIRES_AFTER.fullmatch(name):
            expires[match[1]] = int(value) if value.isdecimal() and len(value) < 10 else value
        elif name != "purpose":
            raise ApiError.bad_request(f"the form has an unknown field {name[:NAME_CHARS]!r}.", name[:NAME_CHARS])
    if (purpose := form.fields.get("purpose")) != "batch":
        raise ApiError.bad_request(f"purpose is {(purpose or 'missing')[:NAME_CHARS]!r}, must be 'batch'.", "purpose")
    if not expires:
        return None
    try:
        return ExpiresAfter.model_validate(expires).seconds
    except ValidationError as error:
        raise validation_error(error.errors(), expires) from None


def _delete(stores: Stores, owner: str, id: str) -> None:
    stores.files.get(owner, id)
    if (batch := stores.batches.uses(owner, id)) is not None:
        raise FileInUseError(f"the file is the input of the batch {batch!r}, which has not ended. Cancel it first.")
    stores.files.delete(owner, id)


def _needed(stores: Stores | None) -> Stores:
    if stores is None:
        raise ApiError(404, NO_STORAGE, type="invalid_request_error", code="storage_not_configured")
    return stores
