"""Read a form with a file while it arrives, and store the file part by part.

In:    a `multipart/form-data` request, and a new file of the store.
Out:   the name of the file and the other fields of the form.
Never: holds the file in memory, or stores a file whose form is not complete.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message

from starlette.requests import ClientDisconnect, Request
from werkzeug.exceptions import RequestEntityTooLarge
from werkzeug.sansio.multipart import Data, Epilogue, Field, File, MultipartDecoder, NeedData

from mars_ray.openai_api.api_error import ApiError
from mars_ray.platform.batches.file_store import NewFile
from mars_ray.serve.middleware.body import drain_body

PARTS = 8
"""Maximum number of parts of a form."""
FIELD_BYTES = 4096
"""Maximum bytes of a field that is not the file."""
BUFFER_BYTES = 1 << 20
"""Maximum bytes in memory between two parts. The server hands on at most 64 KiB at a time."""
WRITE_BYTES = 1 << 18
"""Bytes of the file to collect before a write, because each write is handed to a thread."""
NAME_CHARS = 200


@dataclass(slots=True)
class UploadedForm:
    """A form whose file has been written."""

    file: NewFile
    filename: str = ""
    fields: dict[str, str] = field(default_factory=dict)


class FormReader:
    """Reads one form. The file goes to the file that `new_file` makes, once the form shows that it has one."""

    def __init__(self, request: Request, new_file: Callable[[], NewFile]) -> None:
        self._request = request
        self._new_file = new_file
        self._form: UploadedForm | None = None
        self._fields: dict[str, bytearray] = {}
        self._part = ""
        self._waiting = bytearray()
        self._complete = False
        """Whether the whole body has arrived."""

    async def read(self) -> UploadedForm:
        """Return the form. Raises an `ApiError` for a form that is malformed or has no file, and errors of the store,
        after which nothing is stored."""
        try:
            await self._read_parts()
            if self._form is None:
                raise ApiError.bad_request("the form has no file. Send it as the field file.", "file")
            await self._flush()
            self._form.fields = {name: _text(name, value) for name, value in self._fields.items()}
            return self._form
        except BaseException as error:
            await self.discard()
            if isinstance(error, Exception) and not self._complete:
                with suppress(ApiError):  # a client that is still sending would not get the answer otherwise
                    await drain_body(self._request.receive)
            raise

    async def discard(self) -> None:
        """Remove what was stored of the file."""
        if self._form:
            await asyncio.to_thread(self._form.file.discard)

    async def _read_parts(self) -> None:
        decoder = MultipartDecoder(_boundary(self._request), BUFFER_BYTES, max_parts=PARTS)
        try:
            async for chunk in self._chunks():
                decoder.receive_data(chunk)
                while not isinstance(event := decoder.next_event(), NeedData):
                    match event:
                        case File():
                            await self._begin_file(event)
                        case Field():
                            if not event.name:  # an empty name stands for the file
                                raise ApiError.bad_request("a field of the form has no name.", code="invalid_form")
                            self._part = event.name
                            self._fields[event.name] = bytearray()
                        case Data():
                            await self._add(event.data)
                        case Epilogue():
                            return
        except (ValueError, RequestEntityTooLarge) as error:
            raise ApiError.bad_request(
                "the body is not a complete form with up to 8 parts.", code="invalid_form"
            ) from error

    async def _chunks(self) -> AsyncIterator[bytes | None]:
        """Yield the body in parts, then None."""
        while not self._complete:
            message = await self._request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            self._complete = not message.get("more_body", False)
            chunk = message.get("body") or b""
            for start in range(0, len(chunk), WRITE_BYTES):
                yield chunk[start : start + WRITE_BYTES]
        yield None

    async def _begin_file(self, part: File) -> None:
        if part.name != "file" or self._form:
            raise ApiError.bad_request("the form must have one file, as the field file.", "file")
        self._part = ""
        self._form = UploadedForm(await asyncio.to_thread(self._new_file), part.filename[:NAME_CHARS])

    async def _add(self, data: bytes) -> None:
        if self._part:
            value = self._fields[self._part]
            value += data
            if len(value) > FIELD_BYTES:
                raise ApiError.bad_request(f"a field of the form has more than {FIELD_BYTES} bytes.")
        else:
            self._waiting += data
            if len(self._waiting) >= WRITE_BYTES:
                await self._flush()

    async def _flush(self) -> None:
        assert self._form is not None
        data = bytes(self._waiting)
        self._waiting.clear()
        await asyncio.to_thread(self._form.file.write, data)


def _boundary(request: Request) -> bytes:
    kind = Message()
    kind["content-type"] = request.headers.get("content-type") or "missing"
    boundary = kind.get_boundary()
    if kind.get_content_type() != "multipart/form-data" or not boundary or not boundary.isascii():
        message = "Send the file as a form: Content-Type: multipart/form-data, with the fields file and purpose."
        raise ApiError(415, message, type="invalid_request_error", code="unsupported_media_type")
    return boundary.encode()


def _text(name: str, value: bytearray) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ApiError.bad_request("a field of the form is not UTF-8.", name[:NAME_CHARS]) from None
