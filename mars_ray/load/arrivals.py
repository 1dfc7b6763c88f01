"""Arrival times and sizes of requests, from a Poisson process or from an Azure trace.

A trace is a .csv.gz file with the columns TIMESTAMP,ContextTokens,GeneratedTokens. A malformed trace is refused.
"""

import csv
import gzip
import math
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated

import typer

from mars_ray.errors import ConfigError, DataError, EmptyDataError
from mars_ray.storage.location import AnyPath, check_reachable, locate

POISSON = "poisson:"
RATE_MAX = 1e6
TRACE_SUFFIX = ".csv.gz"
COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
TOKENS_MAX = 10_000_000
"""Maximum accepted token count."""

TraceSpeed = Annotated[float, typer.Option(help="Speed of the replay, relative to the trace.")]
OutputScale = Annotated[float, typer.Option(help="Factor for the answer lengths in the trace.")]


@dataclass(frozen=True, slots=True)
class Poisson:
    """A Poisson process: independent arrivals at a mean rate."""

    rate_per_s: float

    def arrivals_s(self, random_source: random.Random) -> Iterator[float]:
        """Yield an endless sequence of arrival times in seconds."""
        now_s = 0.0
        while True:
            now_s += random_source.expovariate(self.rate_per_s)
            yield now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Factors that scale a trace to the capacity of a machine."""

    speed: float = 1.0
    """Factor by which arrivals are sped up."""
    prompt: float = 1.0
    output: float = 1.0


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace."""

    arrival_s: float
    """Seconds since the first request."""
    context_tokens: int
    generated_tokens: int

    def scaled(self, scales: Scales) -> "TraceRow":
        """Return the scaled request, with at least one token each of prompt and answer."""
        return TraceRow(
            self.arrival_s / scales.speed,
            max(1, math.floor(self.context_tokens * scales.prompt + 0.5)),
            max(1, math.floor(self.generated_tokens * scales.output + 0.5)),
        )


def parse_trace(text: str) -> Poisson | AnyPath:
    """Return a Poisson rate or the location of a trace file. Raises `ConfigError` for anything else."""
    if not text.startswith(POISSON):
        if text.endswith(TRACE_SUFFIX):
            return locate(text)
        raise ConfigError(f"trace is {text!r}; give poisson:RATE, such as poisson:2.5, or a file that ends in .csv.gz.")
    try:
        rate_per_s = float(text.removeprefix(POISSON))
    except ValueError:
        rate_per_s = math.nan
    if not 1 / RATE_MAX <= rate_per_s <= RATE_MAX:
        raise ConfigError(
            f"trace is {text!r}; after the colon give requests per second in {1 / RATE_MAX:g}..{RATE_MAX:g}."
        )
    return Poisson(rate_per_s)


def read_trace(path: AnyPath) -> list[TraceRow]:
    """Read a trace. Raises a `DataError` that names the path, the line and the wrong value."""
    rows: list[TraceRow] = []
    start: datetime | None = None
    check_reachable(path)
    try:
        with path.open("rb") as stored, gzip.open(stored, "rt", encoding="utf-8-sig", newline="") as file:
            lines = csv.reader(file)
            if (header := next(lines, [])) != COLUMNS:
                raise DataError(f"{path}, line 1, is {','.join(header)[:80]!r}; it must be {','.join(COLUMNS)}.")
            for fields in filter(None, lines):
                location = f"{path}, line {lines.line_num}"
                if len(fields) != len(COLUMNS):
                    raise DataError(f"{location}, has {len(fields)} fields; there must be {len(COLUMNS)}.")
                timestamp = _timestamp(location, fields[0])
                start = start or timestamp
                row = TraceRow(
                    (timestamp - start).total_seconds(), _tokens(location, fields[1]), _tokens(location, fields[2])
                )
                if row.arrival_s < (rows[-1].arrival_s if rows else 0.0):
                    raise DataError(
                        f"{location}, goes back in time to {fields[0]!r}; sort the trace by its timestamps."
                    )
                rows.append(row)
    except FileNotFoundError:
        raise DataError(f"There is no file {path}. Give a trace that ends in .csv.gz, or poisson:RATE.") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}.") from error
    if not rows:
        raise EmptyDataError(f"{path} has no requests.")
    return rows


def _timestamp(location: str, text: str) -> datetime:
    try:
        # Python truncates the seven decimal digits to microseconds. The time zone is dropped, so all times can be
        # compared.
        return datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        raise DataError(f"{location}: {text!r} is not a time such as 2023-11-16 18:17:03.9799600.") from None


def _tokens(location: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and int(text) <= TOKENS_MAX):
        raise DataError(f"{location}: {text!r} is not a token count; give 0..{TOKENS_MAX}.")
    return int(text)
