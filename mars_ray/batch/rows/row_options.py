"""Read the sampling and decoding options of a row, which override the options of the job.

An option is either a column of its own, or a field of the object in the column `sampling`. The object accepts every
sampling parameter under its vLLM name, and may be given as JSON text. Null values are ignored.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from reprlib import repr as shortened
from typing import Any

from mars_ray.batch.rows.row_format import JsonRecord
from mars_ray.chat.unicode_text import refuse_lone_surrogates
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import NUMBERS, DecodeParams, SamplingParams, seed_of
from mars_ray.errors import RequestError
from mars_ray.openai_api.strict_schema import closed_schema

TOKEN_DIGITS = 10
"""Maximum digits of a token id."""

COLUMNS = ("max_tokens", "temperature", "top_p", "seed", "stop", "n")
"""Parameters that may be columns of their own."""
OPTIONS = (*COLUMNS, "sampling", "threshold", "mode")
"""Columns that hold options."""
GRAMMARS = ("schema", "regex", "response_format")
INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs")
PARAMETERS = frozenset(
    (
        *COLUMNS,
        *INTEGERS,
        *GRAMMARS,
        *NUMBERS,
        *("stop_token_ids", "ignore_eos", "logit_bias"),
    )
)
"""Parameters that the column `sampling` may have."""


def sampling_of(id: str, columns: JsonRecord, job: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a row. Raises `RequestError` for an unknown parameter or a bad value."""
    options = present(columns, *COLUMNS)
    refuse_lone_surrogates(options)
    options |= sampling_options(columns.get("sampling"))
    for name in INTEGERS:
        value = options.get(name)
        if isinstance(value, float) and value.is_integer():  # an integer column with nulls may be stored as floats
            options[name] = int(value)
    match options.get("stop"):
        case str(stop):
            options["stop"] = (stop,)
        case list(stops):
            options["stop"] = tuple(stops)
    if (ids := options.get("stop_token_ids")) is not None:
        options["stop_token_ids"] = _stop_token_ids(ids)
    if isinstance(biases := options.get("logit_bias"), dict):  # JSON keys are always text
        options["logit_bias"] = {
            int(token) if len(token) <= TOKEN_DIGITS and token.isdecimal() else token: bias
            for token, bias in biases.items()
        }
    grammars = [_grammar(name, options.pop(name)) for name in GRAMMARS if name in options]
    if len(grammars) > 1:
        raise RequestError(f"give only one of {', '.join(GRAMMARS)}.")
    if grammars:
        [options["grammar"]] = grammars
    if job.seed is not None:
        options.setdefault("seed", seed_of(f"{job.seed} {id}"))
    return replace(job, **options)


def decode_of(columns: JsonRecord, job: DecodeParams) -> DecodeParams:
    """Return the decoding parameters of a row. Raises `RequestError` for values out of range."""
    options = present(columns, "threshold", "mode")
    if options.get("mode") in list(Mode):
        options["mode"] = Mode(options["mode"])
    if "threshold" in options:
        options["floor"] = None
    return replace(job, **options)


def present(columns: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the columns with these names that are not null."""
    return {name: columns[name] for name in names if columns.get(name) is not None}


def sampling_options(sampling: Any) -> dict[str, Any]:
    """Return the parameters in a row's `sampling` column, an object or its JSON text. Raises `RequestError` for an
    unknown parameter, and for text that is not JSON."""
    if sampling is None:
        return {}
    if isinstance(sampling, str):
        sampling = _parsed(sampling)
    if not isinstance(sampling, dict):
        raise RequestError(f"sampling is {shortened(sampling)}, must be an object of parameters.")
    refuse_lone_surrogates({"sampling": sampling})
    if unknown := sorted(name for name, value in sampling.items() if value is not None and name not in PARAMETERS):
        raise RequestError(
            f"sampling has the unknown parameter {unknown[0]!r}; the known ones are {', '.join(sorted(PARAMETERS))}."
        )
    return present(sampling, *PARAMETERS)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"sampling is {shortened(text)}, which is not JSON ({error}).") from None


def _stop_token_ids(ids: Any) -> frozenset[int]:
    if not isinstance(ids, list):
        raise RequestError(f"stop_token_ids is {shortened(ids)}, must be a list of token ids.")
    for token in ids:
        if not isinstance(token, int):  # a value of another type may not be hashable
            raise RequestError(f"stop_token_ids has {shortened(token)}; token ids must be integers.")
    return frozenset(ids)


def _grammar(name: str, value: Any) -> GrammarSpec | None:
    """Return the grammar of the answer, or None for free text.

    The engine checks the grammar itself. Raises `RequestError` if the value is not a grammar.
    """
    match name, value:
        case "regex", str(text):
            return GrammarSpec(kind="regex", text=text)
        case "schema", dict() | str():
            return _schema(value)
        case "response_format", {"type": "text"}:
            return None
        case "response_format", {"type": "json_object"}:
            return GrammarSpec(kind="json_object")
        case "response_format", {"type": "json_schema", "json_schema": {"schema": dict(schema), "strict": True}}:
            return _schema(closed_schema(schema))
        case "response_format", {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return _schema(schema)
    raise RequestError(f"{name} is {shortened(value)}, which is not a grammar.")


def _schema(schema: Any) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=schema if isinstance(schema, str) else json.dumps(schema))
