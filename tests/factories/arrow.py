"""Arrow arrays of any type."""

from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

INT64 = st.integers(-(2**63), 2**63 - 1)
TIMES = [
    pa.timestamp("s"),
    pa.timestamp("us", "UTC"),
    pa.timestamp("ns"),
    pa.timestamp("ms", "Nowhere/Nothing"),
    pa.duration("s"),
    pa.duration("ns"),
    pa.time64("us"),
    pa.date64(),
]
leaves = st.sampled_from(
    [
        (pa.null(), st.none()),
        (pa.bool_(), st.booleans()),
        (pa.int8(), st.integers(-128, 127)),
        (pa.uint64(), st.integers(0, 2**64 - 1)),
        (pa.float16(), st.just(1.5)),
        (pa.float32(), st.floats(width=32)),
        (pa.float64(), st.floats()),
        (pa.string(), st.text(st.characters(codec="utf-8"))),
        (pa.string_view(), st.text(st.characters(codec="utf-8"))),
        (pa.large_string(), st.text(st.characters(codec="utf-8"))),
        (pa.binary(), st.binary() | st.builds(lambda: b"\xff" * 5000)),
        (pa.large_binary(), st.binary()),
        (pa.binary(4), st.binary(min_size=4, max_size=4)),
        (pa.date32(), st.dates()),
        (pa.decimal128(20, 2), st.decimals("-1e9", "1e9", places=2)),
        (pa.decimal256(60, 2), st.decimals("-1e9", "1e9", places=2)),
        (pa.month_day_nano_interval(), st.just((1, 2, 3))),
        (pa.dictionary(pa.int8(), pa.string()), st.sampled_from("ab")),
    ]
)
extensions = st.sampled_from([(pa.uuid(), st.binary(min_size=16, max_size=16)), (pa.json_(), st.just("[1]"))])


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = inner.map(lambda pair: (pa.list_(pair[0]), st.lists(pair[1] | st.none(), max_size=3)))
    fixed = inner.map(lambda pair: (pa.list_(pair[0], 2), st.lists(pair[1], min_size=2, max_size=2)))
    structs = inner.map(
        lambda pair: (pa.struct([("a", pair[0]), ("é", pair[0])]), st.fixed_dictionaries({"a": pair[1] | st.none()}))
    )
    maps = inner.map(
        lambda pair: (pa.map_(pa.string(), pair[0]), st.lists(st.tuples(st.sampled_from("xy"), pair[1] | st.none())))
    )
    return lists | fixed | structs | maps


def any_arrays(length: int | None = None) -> st.SearchStrategy[pa.Array]:
    """Return arrays of any type and values, also of times that Python cannot represent."""
    arrays = (extensions | st.recursive(leaves, nested, max_leaves=3)).flatmap(
        lambda pair: _lists(pair[1], length).map(lambda values: pa.array(values, pair[0]))
    )
    times = st.sampled_from(TIMES).flatmap(
        lambda type: _lists(INT64, length).map(lambda values: pa.array(values, pa.int64()).view(type))
    )
    return arrays | times


def _lists(values: st.SearchStrategy[Any], length: int | None) -> st.SearchStrategy[list[Any]]:
    return st.lists(values | st.none(), min_size=length or 0, max_size=5 if length is None else length)
