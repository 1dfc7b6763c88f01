"""Files and batches of OpenAI's API: request bodies, completion windows, limits, and the objects in answers.

In:    request bodies.
Out:   checked bodies; lists of OpenAI's objects.
Never: accepts a window that the runner cannot keep a deadline for.

Source of the format: OpenAI API reference, "Files" and "Batch".
"""

import re
from typing import Annotated, Generic, Literal, TypeVar

from openai.types.batch import Batch
from openai.types.file_object import FileObject
from pydantic import BaseModel, Field, StringConstraints, field_validator

from mars_ray.chat.request_body import RequestBody

BatchUrl = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
"""Routes that the rows of a batch may call."""
METADATA_PAIRS = 16
WINDOW_S = {"m": 60, "h": 3600}
WINDOW_MIN_S, WINDOW_MAX_S = 60, 7 * 24 * 3600
"""Shortest and longest completion window, in seconds."""
_WINDOW = re.compile(r"([1-9][0-9]{0,4})([mh])")

T = TypeVar("T", FileObject, Batch)


class ExpiresAfter(RequestBody):
    """Time after which a file is deleted."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=30 * 24 * 3600)


class BatchRequest(RequestBody):
    """Body of `POST /v1/batches`."""

    input_file_id: str = Field(max_length=128)
    endpoint: BatchUrl
    completion_window: str = Field(max_length=16)
    """Minutes or hours, such as "30m" or "24h"."""
    metadata: (
        dict[
            Annotated[str, StringConstraints(max_length=64)],
            Annotated[str, StringConstraints(max_length=512)],
        ]
        | None
    ) = Field(None, max_length=METADATA_PAIRS)
    output_expires_after: ExpiresAfter | None = None

    @field_validator("completion_window")
    @classmethod
    def _window(cls, window: str) -> str:
        window_seconds(window)
        return window


class StorageLimits(BaseModel, extra="forbid", frozen=True):
    """Limits on what one owner may store."""

    files: int = Field(500, ge=1)
    """Maximum number of files of one owner, results of batches included."""
    file_bytes: int = Field(200 * 2**20, ge=1)
    """Maximum bytes of one uploaded file."""
    bytes: int = Field(2 * 2**30, ge=1)
    """Maximum bytes of all files of one owner. Results of batches count, but are never refused."""
    uploads: int = Field(2, ge=1)
    """Maximum uploads of one key at the same time, in one gateway."""
    rows: int = Field(50_000, ge=1)
    """Maximum rows of one batch."""
    unfinished_batches: int = Field(50, ge=1)
    """Maximum batches of one owner that have not ended."""


class ObjectPage(BaseModel, Generic[T]):
    """One page of a list."""

    object: Literal["list"] = "list"
    data: list[T]
    first_id: str | None
    last_id: str | None
    has_more: bool


def window_seconds(window: str) -> int:
    """Return the seconds of a completion window such as "24h". Raises `ValueError`."""
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * WINDOW_S[match[2]] if match else 0
    if not WINDOW_MIN_S <= seconds <= WINDOW_MAX_S:
        raise ValueError(
            f"completion_window must be minutes or hours from 1m to 168h, such as 30m or 24h, not {window!r}"
        )
    return seconds
