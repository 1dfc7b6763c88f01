"""What became of a row, and the table in which outcomes travel from the workers to the driver.

In:    a `Generated` or a `Rejected` for each row.
Out:   one table of them in order; and from such a table, the generated ones and the rejected ones.
Never: decodes, writes files.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from mars_ray.engine.chunk import FinishReason

OUTPUT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", pa.string()),
        ("text", pa.string()),
        ("tokens", pa.int64()),
        ("forwards", pa.int64()),
        ("finish_reason", pa.string()),
    ]
)
"""The columns of the output files."""

_TRAVEL_SCHEMA = pa.schema(
    [*OUTPUT_SCHEMA, ("reason", pa.string()), ("row", pa.string()), ("decode_seconds", pa.float64())]
)


@dataclass(frozen=True, slots=True)
class Generated:
    """A row that was answered."""

    id: str
    prompt: str
    text: str
    tokens: int
    """Generated tokens, the one that stopped it included."""
    forwards: int
    """Runs of the network it took part in."""
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that was not answered."""

    id: str | None
    """The id it came with, if any."""
    reason: str
    row: str
    """Its text, what is not UTF-8 replaced."""


@dataclass(frozen=True, slots=True)
class OutcomeBatch:
    """What one table held; `generated` has the columns of the output files."""

    generated: pa.Table
    rejected: list[Rejected]
    decode_seconds: float


def outcome_table(outcomes: Sequence[Generated | Rejected], decode_seconds: float) -> pa.Table:
    """Lay out `outcomes`, one row each, with an equal share of the seconds they took together."""
    share = {"decode_seconds": decode_seconds / max(1, len(outcomes))}
    rows: list[dict[str, Any]] = [asdict(outcome) | share for outcome in outcomes]
    return pa.Table.from_pylist(rows, schema=_TRAVEL_SCHEMA)


def read_outcomes(table: pa.Table) -> OutcomeBatch:
    """Undo `outcome_table`."""
    answered = pc.is_null(table["reason"])
    refused = table.filter(pc.invert(answered)).select(["id", "reason", "row"]).to_pylist()
    return OutcomeBatch(
        generated=table.filter(answered).select(OUTPUT_SCHEMA.names).cast(OUTPUT_SCHEMA),
        rejected=[Rejected(**fields) for fields in refused],
        decode_seconds=pc.sum(table["decode_seconds"]).as_py() or 0.0,
    )
