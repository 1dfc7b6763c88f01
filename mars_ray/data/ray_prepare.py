"""Records -> packed rows: read and tokenised by Ray Data, packed in order as they arrive (shell)."""

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import pyarrow as pa
import ray.data

from mars_ray.data.chat import ChatEncoder, Encoded
from mars_ray.data.packed import PackedWriter, PackReport
from mars_ray.data.packing import Packer
from mars_ray.data.ray_read import read_raw
from mars_ray.data.records import Record, parse_record
from mars_ray.errors import BadRecordError, EmptyDataError
from mars_ray.model.folder import check_folder
from mars_ray.model.tokenizer import load_tokenizer
from mars_ray.progress import ProgressLine

ROWS_PER_BLOCK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """How records become rows."""

    length: int
    """Tokens per packed row; no example is longer."""
    overlong: Literal["drop", "truncate"]
    bad_records: Literal["error", "drop"]


def prepare(source: Path, folder: Path, model: Path, options: PrepareOptions, progress: ProgressLine) -> PackReport:
    """Tokenise `source` with the tokenizer of `model` and write packed rows into `folder`.

    Raises `DataError` for an unreadable source or, unless they are dropped, its first bad record; `EmptyDataError`
    when nothing is left to learn from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    packer, writer = Packer(options.length, options.overlong), PackedWriter(folder, options.length)
    started_s = time.monotonic()
    records = bad = 0
    for batch in _tokenised(source, model).iter_batches(batch_size=ROWS_PER_BLOCK, batch_format="pyarrow"):
        for row in batch.to_pylist():
            records += 1
            if not row["problem"]:
                writer.write(packer.add(Encoded(row["tokens"], row["response"])))
            elif options.bad_records == "drop":
                bad += 1
            else:
                raise BadRecordError(
                    f"{source}, record {records}: {row['problem']}. Mend the record, or set bad_records: drop."
                )
        progress.update(records, {"tokens": packer.tokens})
    writer.write(packer.finish())
    if not packer.response_tokens:
        raise EmptyDataError(
            f"{source} holds nothing to learn from: {records} records, {packer.dropped} of them too long."
        )
    seconds = time.monotonic() - started_s
    report = PackReport(
        records=records,
        bad_records=bad,
        dropped_overlong=packer.dropped,
        truncated=packer.truncated,
        examples=packer.examples,
        tokens=packer.tokens,
        response_tokens=packer.response_tokens,
        rows=writer.rows,
        length=options.length,
        fill=packer.tokens / (writer.rows * options.length),
        seconds=seconds,
        tokens_per_s=packer.tokens / seconds,
    )
    writer.close(report)
    return report


def _tokenised(source: Path, model: Path) -> ray.data.Dataset:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False  # ours shows records and tokens instead of blocks
    context.execution_options.preserve_order = True  # the same records give the same rows
    return read_raw(source, ROWS_PER_BLOCK).map_batches(
        _tokenise, fn_kwargs={"model": str(model)}, batch_format="pyarrow"
    )


@lru_cache(maxsize=1)
def _encoder(model: str) -> ChatEncoder:
    found = check_folder(Path(model))
    return ChatEncoder(load_tokenizer(found.path, found.config, found.tokenizer_is_custom))


def _tokenise(batch: pa.Table, model: str) -> pa.Table:
    """JSON texts in; ids, response marks and problem (empty when there is none) out."""
    parsed = [_parse(raw) for raw in batch["raw"].to_pylist()]
    encoded = iter(_encoder(model).encode([record for record in parsed if isinstance(record, Record)]))
    outcomes = [next(encoded) if isinstance(record, Record) else record for record in parsed]
    nothing = Encoded([], [])
    kept = [outcome if isinstance(outcome, Encoded) else nothing for outcome in outcomes]
    return pa.table(
        {
            "tokens": pa.array([each.tokens for each in kept], pa.list_(pa.int32())),
            "response": pa.array([each.response for each in kept], pa.list_(pa.bool_())),
            "problem": ["" if isinstance(outcome, Encoded) else str(outcome) for outcome in outcomes],
        }
    )


def _parse(raw: bytes) -> Record | BadRecordError:
    try:
        return parse_record(raw)
    except BadRecordError as error:
        return error
