"""Values and results of the rows of a batch job."""

import json

from hypothesis import strategies as st

from mars_ray.batch.rows.row_tables import RowResult

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def row_result(number: int, error: bool = False) -> RowResult:
    key = number.to_bytes(16, "big")
    if error:
        return RowResult(key=key, error=json.dumps({"id": str(number)}), reason="bad")
    record = json.dumps({"id": str(number), "text": f"text {number}"})
    return RowResult(key=key, records=(record,), tokens=(number + 1,), forwards=(1,), threshold=0.9, worker="one")
