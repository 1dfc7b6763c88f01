"""Bodies of 1 MiB for each route: wrong in every field that a request may have, or valid and large."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from fastapi.routing import APIRoute
from pydantic import BaseModel

from mars_ray.openai_api.protocol import IGNORED, NEUTRAL, ChatCompletionRequest
from mars_ray.platform.accounts.admin_routes import admin_routes
from mars_ray.platform.anthropic.messages import messages_routes
from mars_ray.platform.batches.batch_routes import batch_routes
from mars_ray.platform.models.model_routes import model_routes
from mars_ray.platform.responses.routes import responses_routes
from mars_ray.serve.http.control_routes import control_routes
from mars_ray.serve.http.routes import openai_routes
from tests.serve.request_samples import CHAT, COMPLETIONS, LEAST, MESSAGES_PATH, RESPONSES

BYTES = 2**20
RIGHT = ('{"role":"user","content":""}', '{"type":"text","text":""}')
"""Items that some lists take."""
ITEMS = ("{}", "1", "null", "[[1]]", *RIGHT)
FIELDS = [f'"{number:06}":""' for number in range(BYTES // 11)]
LAST = {"1": '"a"', "[[1]]": '"a"'} | dict.fromkeys(RIGHT, "1")
"""For lists whose items are right but for the last: what that may be."""

USED = {"type": "tool_result", "tool_use_id": "a", "content": "b"}

Put = Callable[[str], str]
"""Makes a body of what is put into one of its places."""
MakeBody = Callable[[], str]
"""Makes a body of a megabyte, which takes milliseconds."""


@cache
def models() -> dict[tuple[str, str], type[BaseModel]]:
    """The model of the body of each route that takes one, by method and path."""
    nobody = cast(Any, None)  # routes are looked at and never called
    routers = (
        openai_routes(nobody),
        responses_routes(nobody, nobody),
        messages_routes(nobody),
        control_routes(nobody, nobody),
        batch_routes(nobody),
        admin_routes(nobody),
        model_routes(nobody),
    )
    routes = [route for router in routers for route in router.routes]
    taking = [each for each in routes if isinstance(each, APIRoute) and each.body_field is not None]
    return {(min(route.methods or ()), route.path): route.body_field.field_info.annotation for route in taking}  # type: ignore[union-attr,misc]


def hostile_bodies() -> Iterator[tuple[str, str, str, MakeBody]]:
    """Yield method, path, a name and what makes a body, for everything that can be wrong in a place of a model, each
    place once."""
    seen: set[tuple[str, str]] = set()
    for (method, path), model in models().items():
        least = LEAST.get(path, {})
        for name, put, annotation in [("an unknown field", _inside(least, "x"), model), *_places(model, least)]:
            if (name, str(annotation)) not in seen:  # routes share fields
                seen.add((name, str(annotation)))
                # A text or a number is refused by its type, whatever is put there instead.
                items = ITEMS if any(map(_holds_others, _kinds(annotation))) else ITEMS[:1]
                for told, body in _fillings(put, items):
                    yield method, path, f"{name}: {told}", body
        yield method, path, "unknown fields", partial(_filled, _after(_inside(least, "x")("1")), "", FIELDS, "")
        for name in sorted(IGNORED | NEUTRAL.keys()) if model is ChatCompletionRequest else ():
            for told, body in _fillings(_inside(least, name), ITEMS[:1]):
                yield method, path, f"{name}: {told}", body


def large_valid_bodies() -> Iterator[tuple[str, str, str, str]]:
    """Yield method, path, a name and a body of up to 1 MiB that every field's type allows, limits set to their most."""
    word, ids = "word ", range(5, 95)
    fields: dict[str, list[tuple[str, Any]]] = {
        CHAT: [
            ("messages", [{"role": "user", "content": word * 3}] * (BYTES // 60)),
            ("messages", [{"role": "user", "content": word * 180}] * 1024),
            ("messages", [{"role": "user", "content": ""}] * 1024),
            ("messages", [{"role": "user", "content": word * (BYTES // 6)}]),
            ("messages", [{"role": "user", "content": "€" * (BYTES // 7)}]),
            ("messages", [{"role": "user", "content": [{"type": "text", "text": word * 40}] * 4096}]),
            ("messages", [{"role": "user", "content": [{"type": "text", "text": ""}] * 30}] * 1000),
            ("stop", [word * 50] * 4),
            ("stop", ["x"] * (BYTES // 6)),
            ("stop_token_ids", list(ids) * (BYTES // 90 // 5)),
            ("logit_bias", {str(token): 1.0 for token in range(4096)}),
            ("logit_bias", {f"{token:0100}": 1.0 for token in range(4096)}),
            ("metadata", {f"{number:06}": "x" for number in range(BYTES // 16)}),
            ("user", "x" * (BYTES - 300)),
            *(("response_format", _format(schema)) for schema in _large_schemas()),
        ],
        COMPLETIONS: [
            ("prompt", word * (BYTES // 6)),
            ("prompt", [word * 3400] * 60),
            ("prompt", ["x"] * 4096),
            ("prompt", list(ids) * (BYTES // 90 // 5)),
            ("prompt", [list(ids) * 20] * 16),
            ("prompt", [list(ids) * 23] * 128),
            ("prompt", [[5]] * 4096),
        ],
        "/tokenize": [
            ("prompt", word * (BYTES // 6)),
            ("prompt", word * 10_000),
            ("messages", [{"role": "user", "content": word * 180}] * 1024),
            ("messages", [{"role": "user", "content": word}] * 500),
        ],
        MESSAGES_PATH: [
            ("messages", [{"role": "user", "content": word * 180}] * 1024),
            ("messages", [{"role": "user", "content": [{"type": "text", "text": ""}] * 30}] * 1000),
            ("messages", [{"role": "user", "content": [{"type": "text", "text": ""}, USED] * 2000}]),
            ("system", [{"type": "text", "text": word * 40}] * 4096),
        ],
        RESPONSES: [
            ("input", word * (BYTES // 6)),
            ("input", [{"role": "user", "content": word * 180}] * 1024),
            ("input", [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 30}] * 900),
            ("metadata", {f"{number:06}": "x" for number in range(BYTES // 16)}),
        ],
        "/detokenize": [("tokens", list(ids) * (BYTES // 90 // 5)), ("tokens", list(ids) * 5)],
    }
    for path, values in fields.items():
        for number, (name, value) in enumerate(values):
            least = {} if path == "/tokenize" else LEAST[path]
            yield "POST", path, f"{name} {number}", json.dumps({**least, name: value}, ensure_ascii=False)


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "large", "schema": schema}}


def _large_schemas() -> Iterator[dict[str, Any]]:
    """Yield JSON schemas: deep, with many properties, with a long list, with a long text."""
    deep: dict[str, Any] = {"type": "string"}
    for depth in range(200):
        deep = {"type": "object", "properties": {"a": deep}}
        if depth in (20, 199):
            yield deep
    yield {"type": "object", "properties": {f"{number:06}": {"type": "string"} for number in range(BYTES // 32)}}
    yield {"enum": [f"{number:06}" for number in range(BYTES // 11)]}
    yield {"type": "string", "description": "x" * (BYTES - 500)}


def _fillings(put: Put, items: Sequence[str]) -> Iterator[tuple[str, MakeBody]]:
    for item in items:
        yield f"[{item}, …]", partial(_filled, put, "[", item, "]")
        if last := LAST.get(item):
            yield f"[{item}, …, {last}]", partial(_filled, put, "[", item, f",{last}]")
    yield "object", partial(_filled, put, "{", FIELDS, "}")


def _filled(put: Put, before: str, items: str | list[str], after: str) -> str:
    """Return a body of at most `BYTES` with as many items in its place as there is room for."""
    room = BYTES - len(put(before + after))
    count = room // (len(items if isinstance(items, str) else items[-1]) + 1)
    return put(before + ",".join([items] * count if isinstance(items, str) else items[:count]) + after)


def _places(model: type[BaseModel], least: dict[str, Any]) -> Iterator[tuple[str, Put, Any]]:
    """Yield each place of a model, however deep, what puts a text there, and the type that belongs there."""
    for name, field in model.model_fields.items():
        yield from _below(field.alias or name, _inside(least, field.alias or name), field.annotation)


def _below(name: str, put: Put, annotation: Any) -> Iterator[tuple[str, Put, Any]]:
    yield name, put, annotation
    for kind in _kinds(annotation):
        if get_origin(kind) is list and any(map(_holds_others, _kinds(get_args(kind)[0]))):
            yield from _below(f"{name}.0", lambda text: put(f"[{text}]"), get_args(kind)[0])
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            tags = {key: get_args(field.annotation)[0] for key, field in kind.model_fields.items() if _is_tag(field)}
            for place, within, inner in _places(kind, tags):
                yield f"{name}({kind.__name__}).{place}", lambda text, within=within: put(within(text)), inner  # type: ignore[misc]


def _holds_others(kind: Any) -> bool:
    """Whether values of a type hold values that are looked at themselves."""
    return get_origin(kind) in (list, dict) or (isinstance(kind, type) and issubclass(kind, BaseModel))


def _is_tag(field: Any) -> bool:
    return get_origin(field.annotation) is Literal


def _kinds(annotation: Any) -> list[Any]:
    """Return the types that a value may be of."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for each in get_args(annotation) for kind in _kinds(each)]
    return [annotation]


def _after(body: str) -> Put:
    return lambda text: f"{body[:-1]},{text}}}"


def _inside(least: dict[str, Any], name: str) -> Put:
    others = "".join(f"{json.dumps(key)}:{json.dumps(value)}," for key, value in least.items() if key != name)
    return lambda text: f"{{{others}{json.dumps(name)}:{text}}}"
