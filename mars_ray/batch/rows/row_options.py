"""What a row asks for in columns of its own, over what the job asks for. A column that is null asks for nothing.

Beside the columns there may be one named `sampling`: an object with any parameter, under vLLM's names for them.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from reprlib import repr as shortened
from typing import Any

from mars_ray.batch.rows.row_format import JsonRecord
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.engine.seeds import seed_of
from mars_ray.errors import RequestError

COLUMNS = ("max_tokens", "temperature", "top_p", "seed", "stop", "n")
"""Parameters that may be columns."""
GRAMMARS = ("schema", "regex", "response_format")
WHOLE = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs")
PARAMETERS = frozenset(
    (
        *COLUMNS,
        *WHOLE,
        *GRAMMARS,
        *("min_p", "stop_token_ids", "ignore_eos", "logit_bias"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    )
)
"""Parameters that `sampling` may hold."""


def sampling_of(id: str, columns: JsonRecord, job: SamplingParams) -> SamplingParams:
    """Return how the row is sampled. Raises `RequestError` for values out of range and for unknown parameters."""
    asked = _asked(columns, *COLUMNS) | asked_in_sampling(columns.get("sampling"))
    for name in WHOLE:
        value = asked.get(name)
        if isinstance(value, float) and value.is_integer():  # parquet has such where some rows have none
            asked[name] = int(value)
    match asked.get("stop"):
        case str(stop):
            asked["stop"] = (stop,)
        case list(stops):
            asked["stop"] = tuple(stops)
    if (ids := asked.pop("stop_token_ids", None)) is not None:
        asked["stop_ids"] = _stop_ids(ids)
    if isinstance(biases := asked.get("logit_bias"), dict):  # JSON has only text for keys
        asked["logit_bias"] = {int(token) if token.isdecimal() else token: bias for token, bias in biases.items()}
    grammars = [_grammar(name, asked.pop(name)) for name in GRAMMARS if name in asked]
    if len(grammars) > 1:
        raise RequestError(f"give one of {', '.join(GRAMMARS)}, not several.")
    if grammars:
        [asked["grammar"]] = grammars
    if job.seed is not None:
        asked.setdefault("seed", seed_of(f"{job.seed} {id}"))
    return replace(job, **asked)


def decode_of(columns: JsonRecord, job: DecodeParams) -> DecodeParams:
    """Return how the row is decoded. Raises `RequestError` for values out of range."""
    asked = _asked(columns, "threshold", "mode")
    if asked.get("mode") in list(Mode):
        asked["mode"] = Mode(asked["mode"])
    if "threshold" in asked:
        asked["floor"] = None
    return replace(job, **asked)


def _asked(columns: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: columns[name] for name in names if columns.get(name) is not None}


def asked_in_sampling(sampling: Any) -> dict[str, Any]:
    """Return the parameters that a row's `sampling` has. Raises `RequestError` for what is no parameter."""
    if sampling is None:
        return {}
    if not isinstance(sampling, dict):
        raise RequestError(f"sampling is {shortened(sampling)}; it must be an object with parameters.")
    if unknown := sorted(name for name, value in sampling.items() if value is not None and name not in PARAMETERS):
        raise RequestError(f"sampling has {unknown[0]!r}; known are {', '.join(sorted(PARAMETERS))}.")
    return _asked(sampling, *PARAMETERS)


def _stop_ids(ids: Any) -> frozenset[int]:
    if not isinstance(ids, list):
        raise RequestError(f"stop_token_ids is {shortened(ids)}; it must be a list of token ids.")
    for each in ids:
        if not isinstance(each, int):  # what is no number may have no hash either
            raise RequestError(f"stop_token_ids holds {shortened(each)}; token ids are whole numbers.")
    return frozenset(ids)


def _grammar(name: str, value: Any) -> GrammarSpec | None:
    """Return the grammar that an answer must hold to, which the engine will check. Raises `RequestError`."""
    match name, value:
        case "regex", str(text):
            return GrammarSpec(kind="regex", text=text)
        case "schema", dict() | str():
            return _schema(value)
        case "response_format", {"type": "text"}:
            return None
        case "response_format", {"type": "json_object"}:
            return GrammarSpec(kind="json_object")
        case "response_format", {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return _schema(schema)
    raise RequestError(f"{name} is {shortened(value)}, which says nothing that an answer could hold to.")


def _schema(schema: Any) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=schema if isinstance(schema, str) else json.dumps(schema))
