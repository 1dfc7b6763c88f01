"""A catalogue of functions for the family `tool_call`: names, parameters, requests for a call, and results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mars_ray.data.tasks.lexicon import CITIES, COLOURS, DAYS, FIRST_NAMES, GOODS, THINGS, VISITS, words

Tool = Mapping[str, Any]
"""A function as in OpenAI's API: name, description, and parameters as a JSON schema."""

Value = str | int | bool
"""Value of an argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of functions."""

    names: tuple[str, ...]
    """Names that it can have in a schema."""
    values: Sequence[Value]
    schema: Mapping[str, Any]
    spoken: Mapping[Value, str] = field(default_factory=dict)
    """Words of a request that stand for a boolean."""


def _open(names: str, values: Sequence[str]) -> Parameter:
    return Parameter(names=words(names), values=values, schema={"type": "string"})


def _closed(names: str, values: Sequence[str]) -> Parameter:
    return Parameter(names=words(names), values=values, schema={"type": "string", "enum": list(values)})


def _number(names: str, values: range) -> Parameter:
    return Parameter(names=words(names), values=values, schema={"type": "integer"})


def _switch(names: str, spoken: Mapping[Value, str]) -> Parameter:
    return Parameter(names=words(names), values=tuple(spoken), schema={"type": "boolean"}, spoken=spoken)


PARAMETERS: Mapping[str, Parameter] = MappingProxyType(
    {
        "city": _open("city place town location", CITIES),
        "start": _open("start from", CITIES),
        "goal": _open("goal to", CITIES),
        "name": _open("name person", FIRST_NAMES),
        "goods": _open("goods product", GOODS),
        "item": _open("item thing", THINGS),
        "day": _open("day", DAYS),
        "time": _open("time", [f"{hour:02}:{minute:02}" for hour in range(6, 22) for minute in range(0, 60, 5)]),
        "text": _open("text message", [f"the {goods} is {state}" for goods in GOODS for state in ("late", "here")]),
        "count": _number("count number", range(2, 100)),
        "days": _number("days", range(2, 10)),
        "guests": _number("guests people", range(2, 13)),
        "degrees": _number("degrees", range(12, 27)),
        "colour": _closed("color", COLOURS[:4]),
        "room": _closed("room", words("kitchen hall office garage")),
        "visit": _closed("visit", VISITS[:4]),
        "unit": _closed("unit", words("euros dollars pounds")),
        "on": _switch("on", {True: "on", False: "off"}),
        "fast": _switch("fast", {True: "fast"}),
    }
)
"""Parameters, keyed by their place in the requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogFunction:
    """A function, and the texts in which its arguments stand in braces."""

    names: tuple[str, ...]
    """Names that it can have."""
    description: str
    parameters: tuple[str, ...]
    """Keys of `PARAMETERS`; those that some request leaves out are optional."""
    requests: tuple[str, ...]
    """Requests of a user; a call has the arguments that stand in the request."""
    result: str
    """Result as JSON text; `value` stands for a number that only the result has."""
    sentence: str
    """Sentence that states the result."""


FUNCTIONS = (
    CatalogFunction(
        names=("get_weather", "forecast"),
        description="Weather in a city.",
        parameters=("city", "days"),
        requests=(
            "How is the weather in {city}?",
            "What is the weather in {city}?",
            "What is the weather in {city} for the next {days} days?",
        ),
        result='{{"degrees": {value}}}',
        sentence="It is {value} degrees in {city}.",
    ),
    CatalogFunction(
        names=("book_table", "reserve"),
        description="Book a table.",
        parameters=("name", "guests", "day"),
        requests=("Book a table for {guests} on {day}, for {name}.", "{name} needs a table for {guests} on {day}."),
        result='{{"table": {value}}}',
        sentence="Table {value} is booked for {name}.",
    ),
    CatalogFunction(
        names=("send_message", "write_to"),
        description="Send a message.",
        parameters=("name", "text"),
        requests=("Tell {name} that {text}.", "Send {name} a message: {text}", "Let {name} know that {text}."),
        result='{{"sent": {value}}}',
        sentence="Message {value} is sent to {name}.",
    ),
    CatalogFunction(
        names=("set_alarm", "wake_up"),
        description="Set an alarm.",
        parameters=("time", "day"),
        requests=("Set an alarm for {time}.", "Wake me up at {time} on {day}."),
        result='{{"alarm": {value}}}',
        sentence="Alarm {value} is set for {time}.",
    ),
    CatalogFunction(
        names=("order_goods", "buy"),
        description="Order goods.",
        parameters=("goods", "count", "fast"),
        requests=("Order {count} boxes of {goods}.", "Buy {count} boxes of {goods}, and {fast}."),
        result='{{"price": {value}}}',
        sentence="The {goods} cost {value} dollars.",
    ),
    CatalogFunction(
        names=("switch_light", "set_light"),
        description="Switch a light.",
        parameters=("room", "on"),
        requests=("Switch the light in the {room} {on}.", "Light {on} in the {room}, please."),
        result='{{"lights": {value}}}',
        sentence="Lights switched in the {room}: {value}.",
    ),
    CatalogFunction(
        names=("set_heating", "heat"),
        description="Heat a room.",
        parameters=("room", "degrees"),
        requests=("Heat the {room} to {degrees} degrees.", "I want {degrees} degrees in the {room}."),
        result='{{"minutes": {value}}}',
        sentence="The {room} takes {value} minutes.",
    ),
    CatalogFunction(
        names=("find_train", "get_train"),
        description="Find a train.",
        parameters=("start", "goal", "day"),
        requests=("Find a train from {start} to {goal}.", "I need a train from {start} to {goal} on {day}."),
        result='{{"train": {value}}}',
        sentence="Train {value} goes from {start} to {goal}.",
    ),
    CatalogFunction(
        names=("add_visit", "plan_visit"),
        description="Plan an appointment.",
        parameters=("visit", "day", "time"),
        requests=("Plan a {visit} appointment on {day} at {time}.", "I go to the {visit} on {day} at {time}."),
        result='{{"visit": {value}}}',
        sentence="Visit {value} is on {day} at {time}.",
    ),
    CatalogFunction(
        names=("count_stock", "in_stock"),
        description="Count the stock.",
        parameters=("item", "colour"),
        requests=("How many {item} are in stock?", "How many {colour} {item} do we have?"),
        result='{{"stock": {value}}}',
        sentence="There are {value} {item} in stock.",
    ),
    CatalogFunction(
        names=("find_person", "phone_of"),
        description="Find a phone number.",
        parameters=("name", "city"),
        requests=("What is the phone number of {name}?", "Find the phone number of {name} in {city}."),
        result='{{"phone": {value}}}',
        sentence="The phone number of {name} is {value}.",
    ),
    CatalogFunction(
        names=("convert_money", "change"),
        description="Change money.",
        parameters=("count", "unit"),
        requests=("How much is {count} dollars in {unit}?", "Change {count} dollars to {unit}."),
        result='{{"money": {value}}}',
        sentence="That is {value} {unit}.",
    ),
)
