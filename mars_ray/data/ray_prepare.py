"""Ray shell: turn records into packed rows. Ray Data reads and tokenises the records, and this process packs them in
order."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
from ray.exceptions import RayError

from mars_ray.data.chat import ChatEncoder, Encoded
from mars_ray.data.dropped_records import MAX_DROPPED, DroppedRecords
from mars_ray.data.packed import PackedWriter, PackReport
from mars_ray.data.packing import Packer, fitted
from mars_ray.data.ray_read import our_error, read_raw
from mars_ray.data.record_file import check_source
from mars_ray.data.records import Record, parse_record
from mars_ray.data.source_version import version_of
from mars_ray.errors import BadRecordError, ConfigError, EmptyDataError, RunError
from mars_ray.model.folder import check_folder
from mars_ray.model.sources.ray_folder import SharedFolder, share_folder
from mars_ray.progress import ProgressLine
from mars_ray.ray_private import reason_of
from mars_ray.storage.location import AnyPath

ROWS_PER_BLOCK = 1024
"""Records per tokenising task. They take a few tenths of a second, whereas Ray's overhead is a few milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """Options for turning records into packed rows."""

    length: int
    """Tokens per packed row, and so the maximum length of an example."""
    overlong: Literal["drop", "truncate"]
    max_dropped: float = MAX_DROPPED
    """Maximum share of the records that may be dropped, because they are unusable or too long. At 0, the first one is
    an error."""


def prepare(source: AnyPath, folder: Path, model: Path, options: PrepareOptions, progress: ProgressLine) -> PackReport:
    """Tokenise `source` with the tokenizer of `model` and write packed rows into `folder`.

    Raises `DataError` for an unreadable source, or if more records must be dropped than `options` allow,
    `EmptyDataError` if no response tokens are left, `ConfigError` for rows longer than the context or the sliding
    window of the model, `ModelError` if `model` cannot tokenise, and `RunError` if workers die.
    """
    started_s = time.monotonic()
    check_source(source)
    check_length(options.length, model)
    version = version_of(source)
    encode_with = share_folder(model)
    _encoder(encode_with)
    records = truncated = 0
    dropped = DroppedRecords()
    packer = Packer(options.length)
    with PackedWriter(folder, options.length) as writer:
        for outcomes in _tokenised(source, encode_with):
            for outcome in outcomes:
                records += 1
                example = fitted(outcome, options.length, options.overlong) if isinstance(outcome, Encoded) else outcome
                if isinstance(example, Encoded):
                    writer.write(packer.add(example))
                    truncated += example is not outcome
                elif options.max_dropped:
                    dropped.add(example, records)
                else:
                    raise BadRecordError(f"{source}, record {records}: {example}. Correct it, or raise max_dropped.")
            progress.update(records, {"tokens": packer.tokens} | ({"dropped": dropped.total} if dropped.total else {}))
        writer.write(packer.finish())
        if not packer.response_tokens:
            raise EmptyDataError(f"{source} holds nothing to learn from. {dropped.summary(source.name, records)}.")
        dropped.check(str(source), records, options.max_dropped)
        seconds = time.monotonic() - started_s
        report = PackReport(
            source=version,
            records=records,
            dropped=dropped.total,
            drop_reasons=dropped.most_common(),
            truncated=truncated,
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


def check_length(length: int, model: Path) -> None:
    """Raise `ConfigError` for rows longer than the context of the model or its sliding window, because examples may be
    as long as a row, and training attends to all tokens of an example."""
    resolved = check_folder(model)
    positions = resolved.max_positions
    if length > positions:
        raise ConfigError(
            f"length is {length}, but the context of the model has {positions} tokens (max_position_embeddings in "
            f"{model / 'config.json'}). Set length to {positions} or less."
        )
    if (window := resolved.sliding_window) and length > window:
        raise ConfigError(
            f"length is {length}, but layers of the model see only the last {window} tokens (sliding_window in "
            f"{model / 'config.json'}), which training does not support. Set length to {window} or less."
        )


def _tokenised(source: AnyPath, model: SharedFolder) -> Iterator[list[Encoded | str]]:
    """Yield one list per block of records; for each record it holds an example, or the reason why there is none."""
    dataset = read_raw(source, ROWS_PER_BLOCK).map_batches(
        _tokenise, fn_kwargs={"model": model}, batch_format="pyarrow"
    )
    dataset.context.enable_progress_bars = False  # our own progress line shows records and tokens
    dataset.context.execution_options.preserve_order = True  # the same records give the same rows
    try:
        for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield _outcomes(batch)
    except RayError as error:
        ours = our_error(error)
        raise ours or RunError(f"{source} could not be tokenised: {reason_of(error)}.") from error


@lru_cache(maxsize=1)
def _encoder(model: SharedFolder) -> ChatEncoder:
    return ChatEncoder(check_folder(model.here()).load_tokenizer())


def _tokenise(batch: pa.Table, model: SharedFolder) -> pa.Table:
    """Turn JSON texts into token ids, response marks and problems; the problem of a good record is empty."""
    parsed = [_parse(raw) for raw in batch["raw"].to_pylist()]
    encoded = iter(_encoder(model).encode([record for record in parsed if isinstance(record, Record)]))
    outcomes = [next(encoded) if isinstance(record, Record) else record for record in parsed]
    nothing = Encoded(np.array([], dtype=np.int32), np.array([], dtype=np.bool_))
    kept = [outcome if isinstance(outcome, Encoded) else nothing for outcome in outcomes]
    return pa.table(
        {
            "tokens": _lists([example.tokens for example in kept]),
            "response": _lists([example.response for example in kept]),
            "problem": ["" if isinstance(outcome, Encoded) else str(outcome) for outcome in outcomes],
        }
    )


def _parse(raw: bytes) -> Record | BadRecordError:
    try:
        return parse_record(raw)
    except BadRecordError as error:
        return error


def _outcomes(batch: pa.Table) -> list[Encoded | str]:
    """Turn a table made by `_tokenise` back into outcomes."""
    pairs = zip(_arrays(batch["tokens"]), _arrays(batch["response"]), batch["problem"].to_pylist(), strict=True)
    return [problem or Encoded(tokens, response) for tokens, response, problem in pairs]


def _lists(arrays: Sequence[np.ndarray]) -> pa.LargeListArray:
    ends = np.cumsum([0, *map(len, arrays)])
    return pa.LargeListArray.from_arrays(ends, pa.array(np.concatenate(arrays)))


def _arrays(column: pa.ChunkedArray) -> Iterator[np.ndarray]:
    for lists in column.chunks:
        values = lists.values.to_numpy(zero_copy_only=False)
        # Copy; otherwise an example that waits in an open row would keep its whole block in Ray's memory.
        yield from (values[start:end].copy() for start, end in pairwise(lists.offsets.to_pylist()))
