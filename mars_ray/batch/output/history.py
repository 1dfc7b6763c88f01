"""Store the metrics of a job, aggregated over all of its runs, in the ledger.

Metrics are written in the same transaction as the results.
"""

from collections import Counter
from collections.abc import Sequence

from mars_ray.batch.output.ledger import Ledger
from mars_ray.batch.output.report import Bar, PacePoint
from mars_ray.batch.rows.row_tables import RowResult

TABLES = """
CREATE TABLE IF NOT EXISTS pace (
    second INTEGER PRIMARY KEY, rows INTEGER, errors INTEGER, tokens INTEGER, forwards INTEGER, threshold REAL
);
CREATE TABLE IF NOT EXISTS tally (what TEXT, value INTEGER, count INTEGER, PRIMARY KEY (what, value)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sample (text TEXT);
"""
SAMPLES = 12
POINTS = 240
"""Maximum number of time spans into which a report divides the job."""
BARS = 24
TENTHS = 10


class History:
    """Counts and distributions of a job's results, stored in `ledger`."""

    def __init__(self, ledger: Ledger) -> None:
        self._db = ledger.connection
        self._db.executescript(TABLES)
        self._before_s = self._last_second
        """Total seconds of the earlier runs, which are added to the times of this run."""
        self._samples_left = SAMPLES - self._number("SELECT count(*) FROM sample")

    def begin(self) -> None:
        """Begin another run of the job."""
        self._before_s = self._last_second
        self._count("runs", Counter([0]))

    def add(self, results: Sequence[RowResult], run_s: float) -> None:
        """Add results that arrived `run_s` seconds after this run began."""
        if not results:
            return
        thresholds = [result.threshold for result in results if result.threshold is not None]
        self._db.execute(
            "INSERT INTO pace VALUES (:second, :rows, :errors, :tokens, :forwards, :threshold)"
            " ON CONFLICT DO UPDATE SET rows = rows + :rows, errors = errors + :errors, tokens = tokens + :tokens,"
            " forwards = forwards + :forwards, threshold = coalesce(:threshold, threshold)",
            {
                "second": self._before_s + int(run_s) + 1,
                "rows": len(results),
                "errors": sum(result.error is not None for result in results),
                "tokens": sum(sum(result.tokens) for result in results),
                "forwards": sum(sum(result.forwards) for result in results),
                "threshold": sum(thresholds) / len(thresholds) if thresholds else None,
            },
        )
        self._db.execute(
            "INSERT INTO tally VALUES ('ran_ms', ?, ?) ON CONFLICT DO UPDATE SET count = excluded.count",
            (self.runs, int(1000 * run_s)),
        )
        pairs = [pair for result in results for pair in zip(result.tokens, result.forwards, strict=True)]
        self._count("length", Counter(tokens for tokens, _ in pairs))
        self._count("ahead", Counter(TENTHS * tokens // max(1, forwards) for tokens, forwards in pairs))
        self._count("cut", Counter({0: sum(result.cut for result in results)}))
        records = [text for result in results for text in result.records][: self._samples_left]
        self._db.executemany("INSERT INTO sample VALUES (?)", [(text,) for text in records])
        self._samples_left -= len(records)

    @property
    def runs(self) -> int:
        """Number of runs."""
        return self._number("SELECT sum(count) FROM tally WHERE what = 'runs'")

    @property
    def tokens(self) -> int:
        """Number of tokens generated."""
        return self._number("SELECT sum(tokens) FROM pace")

    @property
    def forwards(self) -> int:
        """Number of forwards, summed over the sequences."""
        return self._number("SELECT sum(forwards) FROM pace")

    @property
    def cut(self) -> int:
        """Number of sequences that ended at the length limit."""
        return self._number("SELECT sum(count) FROM tally WHERE what = 'cut'")

    @property
    def seconds(self) -> float:
        """Seconds from the start of each run to its last result, summed over the runs."""
        return self._number("SELECT sum(count) FROM tally WHERE what = 'ran_ms'") / 1000

    def pace(self) -> tuple[PacePoint, ...]:
        """Return the metrics over time, in time spans of equal length."""
        span = -(-max(1, self._last_second) // POINTS)
        points = self._db.execute(
            f"SELECT (second - 1) / {span}, sum(rows), sum(errors), sum(tokens), sum(forwards),"
            " sum(threshold * tokens) / nullif(sum(tokens), 0)"
            " FROM pace GROUP BY 1 ORDER BY 1"
        )
        return tuple(
            PacePoint(
                second=float((number + 1) * span),
                rows=rows,
                errors=errors,
                tokens=tokens,
                forwards=forwards,
                threshold=1.0 if threshold is None else threshold,
            )
            for number, rows, errors, tokens, forwards, threshold in points
        )

    def lengths(self) -> tuple[Bar, ...]:
        """Return the histogram of tokens per sequence."""
        return self._bars("length", 1.0)

    def ahead(self) -> tuple[Bar, ...]:
        """Return the histogram of tokens per forward."""
        return self._bars("ahead", TENTHS)

    def samples(self) -> list[str]:
        """Return the first records of the job."""
        return [text for (text,) in self._db.execute("SELECT text FROM sample")]

    @property
    def _last_second(self) -> int:
        return self._number("SELECT max(second) FROM pace")

    def _bars(self, metric: str, unit: float) -> tuple[Bar, ...]:
        largest = self._number("SELECT max(value) FROM tally WHERE what = ?", metric)
        width = largest // BARS + 1
        counts = dict(
            self._db.execute(f"SELECT value / {width}, sum(count) FROM tally WHERE what = ? GROUP BY 1", (metric,))
        )
        return tuple(
            Bar(low=number * width / unit, high=(number + 1) * width / unit, count=counts.get(number, 0))
            for number in range(min(counts, default=0), max(counts, default=-1) + 1)
        )

    def _count(self, metric: str, values: Counter[int]) -> None:
        self._db.executemany(
            "INSERT INTO tally VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count",
            [(metric, value, count) for value, count in values.items()],
        )

    def _number(self, query: str, *values: object) -> int:
        [(value,)] = self._db.execute(query, values)
        return int(value or 0)
