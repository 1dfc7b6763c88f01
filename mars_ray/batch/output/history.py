"""The metrics of a job over all of its runs, kept in its ledger.

They are written in the same transaction as the results, and their size does not grow with the rows.
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
"""Points of the pace that a report has at most."""
BARS = 24
TENTHS = 10


class History:
    """Counts and distributions of the job in `ledger`; each start of it counts as a run."""

    def __init__(self, ledger: Ledger) -> None:
        self._db = ledger.connection
        self._db.executescript(TABLES)
        self._before_s = self._last_second
        """The second of the pace at which earlier runs end."""
        self._samples_left = SAMPLES - self._one("SELECT count(*) FROM sample")

    def begin(self) -> None:
        """Count a run."""
        self._before_s = self._last_second
        self._count("runs", Counter([0]))

    def add(self, results: Sequence[RowResult], run_s: float) -> None:
        """Count results written `run_s` seconds after this run began."""
        if not results:
            return
        thresholds = [each.threshold for each in results if each.threshold is not None]
        self._db.execute(
            "INSERT INTO pace VALUES (:second, :rows, :errors, :tokens, :forwards, :threshold)"
            " ON CONFLICT DO UPDATE SET rows = rows + :rows, errors = errors + :errors, tokens = tokens + :tokens,"
            " forwards = forwards + :forwards, threshold = coalesce(:threshold, threshold)",
            {
                "second": self._before_s + int(run_s) + 1,
                "rows": len(results),
                "errors": sum(each.error is not None for each in results),
                "tokens": sum(sum(each.tokens) for each in results),
                "forwards": sum(sum(each.forwards) for each in results),
                "threshold": sum(thresholds) / len(thresholds) if thresholds else None,
            },
        )
        self._db.execute(
            "INSERT INTO tally VALUES ('ran_ms', ?, ?) ON CONFLICT DO UPDATE SET count = excluded.count",
            (self.runs, int(1000 * run_s)),
        )
        pairs = [pair for each in results for pair in zip(each.tokens, each.forwards, strict=True)]
        self._count("length", Counter(tokens for tokens, _ in pairs))
        self._count("ahead", Counter(TENTHS * tokens // max(1, forwards) for tokens, forwards in pairs))
        self._count("cut", Counter({0: sum(each.cut for each in results)}))
        records = [text for each in results for text in each.records][: self._samples_left]
        self._db.executemany("INSERT INTO sample VALUES (?)", [(text,) for text in records])
        self._samples_left -= len(records)

    @property
    def runs(self) -> int:
        """How often the job was started."""
        return self._one("SELECT sum(count) FROM tally WHERE what = 'runs'")

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return self._one("SELECT sum(tokens) FROM pace")

    @property
    def forwards(self) -> int:
        """Forwards, summed over the sequences."""
        return self._one("SELECT sum(forwards) FROM pace")

    @property
    def cut(self) -> int:
        """Sequences that ended at the length limit."""
        return self._one("SELECT sum(count) FROM tally WHERE what = 'cut'")

    @property
    def seconds(self) -> float:
        """Seconds from the start of each run to the last row it wrote down, all runs together."""
        return self._one("SELECT sum(count) FROM tally WHERE what = 'ran_ms'") / 1000

    def pace(self) -> tuple[PacePoint, ...]:
        """Return what was done when, in spans of equal length."""
        span = -(-max(1, self._last_second) // POINTS)
        found = self._db.execute(
            f"SELECT (second - 1) / {span}, sum(rows), sum(errors), sum(tokens), sum(forwards), avg(threshold)"
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
            for number, rows, errors, tokens, forwards, threshold in found
        )

    def lengths(self) -> tuple[Bar, ...]:
        """Return the sequences by their tokens."""
        return self._bars("length", 1.0)

    def ahead(self) -> tuple[Bar, ...]:
        """Return the sequences by tokens per forward."""
        return self._bars("ahead", TENTHS)

    def samples(self) -> list[str]:
        """Return the first records."""
        return [text for (text,) in self._db.execute("SELECT text FROM sample")]

    @property
    def _last_second(self) -> int:
        return self._one("SELECT max(second) FROM pace")

    def _bars(self, what: str, unit: float) -> tuple[Bar, ...]:
        most = self._one("SELECT max(value) FROM tally WHERE what = ?", what)
        width = most // BARS + 1
        found = dict(
            self._db.execute(f"SELECT value / {width}, sum(count) FROM tally WHERE what = ? GROUP BY 1", (what,))
        )
        return tuple(
            Bar(low=number * width / unit, high=(number + 1) * width / unit, count=found.get(number, 0))
            for number in range(min(found, default=0), max(found, default=-1) + 1)
        )

    def _count(self, what: str, values: Counter[int]) -> None:
        self._db.executemany(
            "INSERT INTO tally VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count",
            [(what, value, count) for value, count in values.items()],
        )

    def _one(self, query: str, *values: object) -> int:
        [(value,)] = self._db.execute(query, values)
        return int(value or 0)
