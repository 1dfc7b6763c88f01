"""Schemas and patterns made to take time or memory, by family, and schemas of any kind drawn at random."""

import json
import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

from mars_ray.engine.grammar.spec import GRAMMAR_CHARACTERS_MAX

Schema = dict[str, Any]

PAIRS = ["".join(pair) for pair in product("abcde", repeat=2)]
PRIMES = (7, 97, 997, 1009, 4999, 9967, 9973, 10007, 30011, 99991, 999_983, 3_000_017, 15_485_863, 2**31 - 1)
LARGE = (10, 100, 1000, 10_000, 10**6, 10**9)


def _patterns(choose: random.Random) -> Schema:
    count = choose.choice((2, 4, 8, 12, 16, 20, 24))
    family: list[Callable[[int], str]] = [
        lambda n: f".*{PAIRS[n]}.*",
        lambda n: f"a{{{n + 1}}}",
        lambda n: f"(a{{{n + 2}}})*",
        lambda n: f".*{PAIRS[n][0]}.{{{n + 9}}}",
        lambda n: f"^[^{PAIRS[n]}]*{PAIRS[n]}[^{PAIRS[n]}]{{0,{n}}}$",
        lambda n: rf"\p{{L}}{{{n},}}.*\d{{{n}}}",
    ]
    make = choose.choice(family)
    parts = [{"pattern": make(number)} for number in range(count)]
    if choose.random() < 0.4:  # the same, one inside the other
        nested: Schema = {}
        for part in parts:
            nested = part | {choose.choice(("allOf", "anyOf", "oneOf")): [nested or {"minLength": 1}]}
        return {"type": "string"} | nested
    return {"type": "string", choose.choice(("allOf", "allOf", "anyOf", "oneOf")): parts}


def _multiples(choose: random.Random) -> Schema:
    numbers = choose.sample(PRIMES, choose.choice((1, 1, 2, 3)))
    kind = choose.choice(("integer", "number"))
    if len(numbers) == 1:
        bounds: Schema = choose.choice(({}, {"minimum": -(10**9), "maximum": 10**12}))
        return {"type": kind, "multipleOf": numbers[0]} | bounds
    return {"type": kind, "allOf": [{"multipleOf": number} for number in numbers]}


def _repeats(choose: random.Random) -> Schema:
    text = choose.choice(("a", ".", "[ab]", r"\p{L}", r"(\w|\d)", "[^a]", "(a|ab|b)"))
    for _ in range(choose.randint(1, 4)):
        least = choose.choice((0, 1, 10, 100, 1000))
        text = f"({text}){{{least},{least + choose.choice((0, 1, 100, 10_000))}}}"
    return {"type": "string", "pattern": choose.choice((text, f".*{text}", f"^{text}$", f"({text}|.*{text})"))}


def _enums(choose: random.Random) -> Schema:
    count = choose.choice((10, 1000, 2000))
    return {"enum": [f"{choose.randrange(10**6)}" * choose.choice((1, 2)) for _ in range(count)]}


def _sizes(choose: random.Random) -> Schema:
    most = choose.choice(LARGE)
    least = choose.choice((0, 1, most // 2, most))
    inner: Schema = choose.choice(({"type": "integer"}, {"type": "string"}, {"enum": [1, 2, 3]}, {"type": "array"}))
    match choose.randrange(4):
        case 0:
            return {"type": "array", "items": inner, "minItems": least, "maxItems": most}
        case 1:
            return {"type": "string", "minLength": least, "maxLength": most}
        case 2:
            return {"type": "object", "minProperties": least, "maxProperties": most, "additionalProperties": inner}
        case _:
            nested: Schema = inner
            for _ in range(choose.randint(2, 6)):
                nested = {"type": "array", "items": nested, "minItems": choose.choice((1, 9, 99)), "maxItems": 999}
            return nested


def _unique(choose: random.Random) -> Schema:
    return {"type": "array", "uniqueItems": True, "items": {"enum": list(range(choose.choice((3, 300))))}}


def _references(choose: random.Random) -> Schema:
    depth = choose.choice((3, 30, 300))
    kind = choose.choice(("chain", "double", "cycle", "recursive"))
    if kind == "chain":
        definitions: Schema = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(depth)}
        definitions[f"d{depth}"] = {"type": "integer"}
    elif kind == "double":  # twice as large with every level
        definitions = {
            f"d{n}": {choose.choice(("allOf", "anyOf", "oneOf")): [{"$ref": f"#/$defs/d{n + 1}"}] * 2}
            for n in range(depth)
        }
        definitions[f"d{depth}"] = {"type": "string", "pattern": "a+"}
    elif kind == "cycle":
        definitions = {"d0": {"allOf": [{"$ref": "#/$defs/d1"}]}, "d1": {"allOf": [{"$ref": "#/$defs/d0"}]}}
    else:
        each = {"type": "object", "properties": {f"k{n}": {"$ref": "#/$defs/d0"} for n in range(depth)}}
        definitions = {"d0": {"anyOf": [each, {"type": "array", "items": {"$ref": "#/$defs/d0"}}, {"type": "null"}]}}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def _objects(choose: random.Random) -> Schema:
    count = choose.choice((10, 100, 300, 1000))
    names = [f"p{number}" for number in range(count)]
    value: Schema = choose.choice(({"type": "integer"}, {}, {"type": "string", "pattern": ".*a.{9}"}))
    schema: Schema = {"type": "object", "properties": dict.fromkeys(names, value)}
    match choose.randrange(5):
        case 0:
            return schema | {"required": names[: choose.choice((0, count // 2, count))]}
        case 1:
            return {"type": "object", "patternProperties": {f"^{name}.*{name}$": value for name in names[:300]}}
        case 2:
            return schema | {"additionalProperties": {"type": "object", "additionalProperties": schema}}
        case 3:
            key = choose.choice(("dependentRequired", "dependentSchemas", "propertyNames", "if", "not"))
            return schema | {key: dict.fromkeys(names, names[:3])}
        case _:
            branches = [{"anyOf": [{"properties": {f"p{i}{j}": {"const": j}}} for j in range(4)]} for i in range(8)]
            return {"type": "object", "allOf": branches[: choose.choice((2, 4, 6, 8))]}


def _formats(choose: random.Random) -> Schema:
    names = ("date-time", "email", "uuid", "ipv6", "uri", "hostname", "duration", "idn-email", "regex", "unknown")
    chosen = choose.sample(names, choose.choice((1, 2, 3)))
    length: Schema = choose.choice(({}, {"minLength": 3, "maxLength": 50}, {"pattern": ".*aa.*"}))
    return {"type": "string", "allOf": [{"format": name} for name in chosen]} | length


def _classes(choose: random.Random) -> Schema:
    names = (r"\p{L}", r"\p{Lu}", r"\p{N}", r"[^\x00-\x7f]", r"[\u0100-\uffff]", r"\S", r"\W", "(?i:straße)")
    parts = [
        choose.choice(names) + choose.choice(("", "+", "*", "{1,50}", "{200}")) for _ in range(choose.randint(1, 9))
    ]
    return {"type": "string", "pattern": choose.choice(("", "|", ".*")).join(parts)}


FAMILIES = (*(_patterns, _multiples, _repeats, _enums, _sizes, _unique, _references, _objects, _formats, _classes),)


def hostile_schemas(count: int, seed: int = 0) -> Iterator[str]:
    """Yield so many schemas as JSON, the families in turn, some of them inside another schema."""
    choose = random.Random(seed)
    given = 0
    while given < count:
        schema = FAMILIES[given % len(FAMILIES)](choose)
        wrapped = choose.random()
        if "$defs" not in schema and wrapped < 0.2:
            schema = {"type": "array", "items": schema}
        elif "$defs" not in schema and wrapped < 0.4:
            schema = {"type": "object", "properties": {"a": schema, "b": schema}, "required": ["a"]}
        text = json.dumps(schema)
        if len(text) <= GRAMMAR_CHARACTERS_MAX:
            given += 1
            yield text
