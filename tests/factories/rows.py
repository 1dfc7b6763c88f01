"""Results of the rows of a batch job."""

import json

from mars_ray.batch.rows.row_tables import RowResult


def row_result(number: int, error: bool = False) -> RowResult:
    key = number.to_bytes(16, "big")
    if error:
        return RowResult(key=key, error=json.dumps({"id": str(number)}), reason="bad")
    record = json.dumps({"id": str(number), "text": f"text {number}"})
    return RowResult(key=key, records=(record,), tokens=(number + 1,), forwards=(1,), threshold=0.9, worker="one")
