"""Outcomes as they arrive -> the output folder and the figures of the job.

In:    tables of outcomes, in order, from wherever they are made.
Out:   a `GenerateReport`; everything that arrived is on the disk, even when the job is cut short.
Never: knows who decodes.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from mars_ray.batch.outcomes import read_outcomes
from mars_ray.batch.shards import ShardWriter
from mars_ray.errors import InterruptedRunError
from mars_ray.progress import ProgressLine


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport:
    """What a finished job did."""

    rows: int
    """Rows answered."""
    errors: int
    """Rows in the errors file."""
    tokens: int
    forwards: int
    """Summed over the rows: one run of the network over a batch counts once for each row in it."""
    decode_seconds: float
    """Mean over the workers of the time spent on rows; loading the model is left out."""
    wall_seconds: float
    tokens_per_s: float
    """Of all workers together while they decode."""
    tokens_per_forward: float
    output: str


class GenerateJob:
    """Collects the outcomes that `workers` make; the output folder is made, or refused, at once."""

    def __init__(self, output: Path, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._output, self._workers, self._clock = output, workers, clock
        self._started_s = clock()
        self._writer = ShardWriter(output)
        self._rows = self._errors = self._tokens = self._forwards = 0
        self._worker_seconds = 0.0

    def collect(self, tables: Iterable[pa.Table], progress: ProgressLine) -> GenerateReport:
        """Write each table as it comes. Ctrl-C raises `InterruptedRunError`; what came before an error is kept."""
        try:
            for table in tables:
                self._add(table)
                progress.update(self._rows + self._errors, self._figures())
        except KeyboardInterrupt:
            raise InterruptedRunError(
                f"Stopped after {self._rows + self._errors} rows, which are in {self._output}. To start again, give "
                "another output folder or empty this one."
            ) from None
        finally:
            self._writer.flush()
        report = self._report()
        self._writer.close(asdict(report))
        return report

    def discard(self) -> None:
        """Take back the folder this job made, if it is still empty."""
        self._writer.discard()

    def _add(self, table: pa.Table) -> None:
        batch = read_outcomes(table)
        self._writer.write(batch.generated)
        self._writer.reject(batch.rejected)
        self._rows += batch.generated.num_rows
        self._errors += len(batch.rejected)
        self._tokens += pc.sum(batch.generated["tokens"]).as_py() or 0
        self._forwards += pc.sum(batch.generated["forwards"]).as_py() or 0
        self._worker_seconds += batch.decode_seconds

    def _figures(self) -> dict[str, object]:
        report = self._report()
        return {
            "tokens/s": f"{report.tokens_per_s:.1f}",
            "tokens/forward": f"{report.tokens_per_forward:.2f}",
            "errors": report.errors,
        }

    def _report(self) -> GenerateReport:
        decode_seconds = self._worker_seconds / self._workers
        return GenerateReport(
            rows=self._rows,
            errors=self._errors,
            tokens=self._tokens,
            forwards=self._forwards,
            decode_seconds=decode_seconds,
            wall_seconds=self._clock() - self._started_s,
            tokens_per_s=self._tokens / decode_seconds if decode_seconds else 0.0,
            tokens_per_forward=self._tokens / self._forwards if self._forwards else 0.0,
            output=str(self._output),
        )
