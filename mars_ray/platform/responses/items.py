"""Items of stored responses: as JSON for the store, as parsed items for a request, and as pages for callers.

In:    the items of a request's input; JSON lists of items from the store.
Out:   items with ids, whose output form OpenAI's clients read; items that a request can begin with.
"""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter

from mars_ray.chat.messages import text_of
from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.errors import RequestError
from mars_ray.platform.responses.protocol import (
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    ItemReference,
    MessageItem,
    ReasoningItem,
)

_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class ItemPage(BaseModel):
    """Response of `/v1/responses/{id}/input_items`."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def stored_items(items: Sequence[Item], response_id: str) -> list[dict[str, Any]]:
    """Return the items of an input with ids, which begin with the id of the response."""
    return [
        {"id": f"{response_id}_in{number}", "type": item.type, "status": "completed", **_fields(item)}
        for number, item in enumerate(items)
    ]


def parsed_items(items: str) -> list[Item]:
    """Return the items of a JSON list from the store."""
    return _ITEMS.validate_json(items)


def item_page(
    items: Sequence[dict[str, Any]], *, limit: int, order: Literal["asc", "desc"], after: str | None
) -> ItemPage:
    """Return up to `limit` items after the item with the id `after`. Raises `RequestError` for an unknown id."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    start = 0
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise RequestError(
                f"after is {after[:NAME_CHARS]!r}, must be the id of an input item of this response.", param="after"
            )
        start = ids.index(after) + 1
    page = ordered[start : start + limit]
    return ItemPage(
        data=page,
        first_id=page[0]["id"] if page else None,
        last_id=page[-1]["id"] if page else None,
        has_more=start + limit < len(ordered),
    )


def _fields(item: Item) -> dict[str, Any]:
    match item:
        case MessageItem():
            part: dict[str, Any] = {"type": "input_text", "text": text_of(item.content)}
            if item.role == "assistant":
                part |= {"type": "output_text", "annotations": []}
            return {"role": item.role, "content": [part]}
        case FunctionCallItem():
            return {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case FunctionOutputItem():
            return {"call_id": item.call_id, "output": text_of(item.output)}
        case ReasoningItem():
            return {"summary": [], "content": [{"type": part.type, "text": part.text} for part in item.content]}
        case ItemReference():
            raise AssertionError("references were replaced by their items")
