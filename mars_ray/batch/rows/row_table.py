"""The tables in which rows travel to whoever decodes them; what comes back is `row_result`."""

from collections.abc import Sequence

import pyarrow as pa

from mars_ray.batch.rows.row_ids import RowId
from mars_ray.batch.rows.row_result import FAILURE

ROW_SCHEMA = pa.schema(
    [("key", pa.binary()), ("id", pa.string()), ("repeated", pa.bool_()), ("raw", pa.binary()), (FAILURE, pa.string())]
)
"""The columns of a block. One that holds a `FAILURE` says why the rest of the input cannot be read."""

READ_RECORDS = 1024
"""Records of a file that are read, and stand in a table, at a time."""


def to_row_table(row_ids: Sequence[RowId], raws: Sequence[bytes]) -> pa.Table:
    """Lay out rows, each with its id."""
    columns = {
        "key": [each.key for each in row_ids],
        "id": [each.id for each in row_ids],
        "repeated": [each.repeated for each in row_ids],
        "raw": list(raws),
        FAILURE: [None] * len(raws),
    }
    return pa.table(columns, schema=ROW_SCHEMA)


def from_row_table(table: pa.Table) -> tuple[list[RowId], list[bytes]]:
    """Undo `to_row_table`."""
    columns = table.to_pydict()
    row_ids = [
        RowId(key=key, id=id, repeated=repeated)
        for key, id, repeated in zip(columns["key"], columns["id"], columns["repeated"], strict=True)
    ]
    return row_ids, columns["raw"]
