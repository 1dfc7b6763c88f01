"""A file of records -> a Ray dataset with one JSON text per record, in order (shell)."""

import json
from pathlib import Path

import pyarrow as pa
import ray.data

from mars_ray.errors import DataError

JSONL = (".jsonl", ".jsonl.gz", ".ndjson", ".json.gz")


def read_raw(path: Path, rows_per_block: int) -> ray.data.Dataset:
    """Read JSONL (plain or gz) or parquet as a binary column `raw`: the JSON text of one record, blank lines left out.

    A record that is not JSON stays in the column: whoever parses it says so, and the other records go on.
    Raises `DataError` for a path that is missing or of another kind.
    """
    if not path.is_file():
        raise DataError(f"There is no file {path}. Give a .jsonl, .jsonl.gz or .parquet file.")
    if path.name.endswith(JSONL):
        gzip = {"compression": "gzip"} if path.suffix == ".gz" else None
        # Latin-1 maps every byte to a character and back: a line that is not UTF-8 fails alone, when it is parsed.
        text = ray.data.read_text(str(path), encoding="latin-1", arrow_open_stream_args=gzip)
        rows = text.map_batches(_to_bytes, batch_format="pyarrow")
    elif path.suffix == ".parquet":
        rows = ray.data.read_parquet(str(path)).map_batches(_to_json, batch_format="pyarrow")
    else:
        raise DataError(f"{path} is neither JSONL nor parquet. Give a .jsonl, .jsonl.gz or .parquet file.")
    return rows.repartition(target_num_rows_per_block=rows_per_block)


def _to_bytes(batch: pa.Table) -> pa.Table:
    return pa.table({"raw": [line.encode("latin-1") for line in batch["text"].to_pylist()]})


def _to_json(batch: pa.Table) -> pa.Table:
    return pa.table({"raw": [json.dumps(row, default=str).encode() for row in batch.to_pylist()]})
