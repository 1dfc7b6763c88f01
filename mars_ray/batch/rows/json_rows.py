"""Parse the JSON text of a row into columns that can be written as JSON again."""

import json

from mars_ray.batch.rows.row_format import JsonRecord
from mars_ray.data.records import parse_object
from mars_ray.errors import BadRecordError


def parse_row(raw: bytes) -> JsonRecord:
    """Return the columns of a row, with null for what is no finite number."""
    try:
        text = json.dumps(parse_object(raw), ensure_ascii=False)
        text.encode()
    except RecursionError:  # JSON that could just be parsed may be too deep to write again
        raise BadRecordError(f"it is nested too deeply: {raw[:60]!r}") from None
    except UnicodeEncodeError:  # JSON may escape it
        raise BadRecordError("its text is not Unicode: half of a surrogate pair is no character") from None
    columns: JsonRecord = json.loads(text, parse_constant=lambda _: None)
    return columns
