"""What a row asks for in columns of its own, over what the job asks for. A column that is null asks for nothing."""

from dataclasses import replace
from typing import Any

from mars_ray.batch.rows.row_format import JsonRecord
from mars_ray.engine.mode import Mode
from mars_ray.engine.request import DecodeParams, SamplingParams
from mars_ray.engine.seeds import seed_of

WHOLE = ("max_tokens", "seed", "n")


def sampling_of(id: str, columns: JsonRecord, job: SamplingParams) -> SamplingParams:
    """Return how the row is sampled. Raises `RequestError` for values out of range."""
    asked = _asked(columns, *WHOLE, "temperature", "top_p", "stop")
    for name in WHOLE:
        value = asked.get(name)
        if isinstance(value, float) and value.is_integer():  # parquet has such where some rows have none
            asked[name] = int(value)
    match asked.get("stop"):
        case str(stop):
            asked["stop"] = (stop,)
        case list(stops):
            asked["stop"] = tuple(stops)
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


def _asked(columns: JsonRecord, *names: str) -> dict[str, Any]:
    return {name: columns[name] for name in names if columns.get(name) is not None}
