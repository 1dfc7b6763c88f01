"""Results of one batch: the output folder of a job, in a thread of its own.

In:    results of rows.
Out:   the rows that are not done; the lines of the output file and of the errors file; OpenAI's usage object.
Never: counts a row twice, or loses a result after `take` has returned: the ledger and the log of jobs see to that.
"""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Self, TypeVar

from openai.types.batch_usage import BatchUsage, InputTokensDetails, OutputTokensDetails

from mars_ray.batch.output.folder import OutputFolder, open_output
from mars_ray.batch.output.ledger import undone
from mars_ray.batch.rows.row_tables import RowResult
from mars_ray.platform.batches.storage_paths import lines_of, make_folder, names_in
from mars_ray.storage.location import AnyPath

T = TypeVar("T")


class BatchOutput:
    """Output of the batch in `folder`. Use it as an asynchronous context manager, and from one event loop.

    Entering raises `OutputError` if another driver works on the batch, and all methods raise the errors of
    `OutputFolder`.
    """

    def __init__(self, folder: AnyPath, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._settings = settings
        # SQLite wants one thread, and writes must not hold up the event loop.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-output")
        self._open = ExitStack()
        self._output: OutputFolder
        self._began_s = time.monotonic()

    async def __aenter__(self) -> Self:
        try:
            await self._run(self._begin)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    async def take(self, results: Sequence[RowResult]) -> list[RowResult]:
        """Store results, and return those that are new."""
        return await self._run(self._output.take, results, time.monotonic() - self._began_s)

    async def undone(self, keys: Sequence[bytes]) -> set[bytes]:
        """Return the keys of rows that are not done."""
        return await self._run(undone, self._output.ledger.path, keys)

    async def counts(self) -> tuple[int, int]:
        """Return the number of rows that are done without and with an error."""
        return await self._run(self._counts)

    async def has_error(self, reason: str) -> bool:
        """Return whether a row that is done has an error with this reason."""
        return await self._run(lambda: reason in self._output.ledger.error_counts())

    async def flush(self) -> None:
        """Write all results to the files that `answers` and `errors` read."""
        await self._run(self._output.flush)

    async def run(self, work: Callable[[Iterator[bytes], Iterator[bytes]], T]) -> T:
        """Return the result of `work`, which gets the lines of the output file and of the errors file.

        Reading past the last line of each raises `RunError` if another driver has taken over, because that driver may
        have removed lines.
        """
        return await self._run(lambda: work(self._own(self._answers()), self._own(self._errors())))

    async def check_driver(self) -> None:
        """Raise `RunError` if another driver has taken over the batch."""
        await self._run(self._output.check_driver)

    def _begin(self) -> None:
        make_folder(self._folder.parent)
        self._output = self._open.enter_context(open_output(self._folder, new=False))
        self._output.ledger.check_settings(self._settings)
        self._output.begin("jsonl", {})

    def _counts(self) -> tuple[int, int]:
        failed = sum(self._output.ledger.error_counts().values())
        return self._output.ledger.done - failed, failed

    def _answers(self) -> Iterator[bytes]:
        rows = self._folder / "rows"
        for name in names_in(rows):
            yield from lines_of(rows / name)

    def _errors(self) -> Iterator[bytes]:
        if (path := self._output.errors_file) is not None:
            yield from lines_of(path)

    def _own(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        yield from lines
        self._output.check_driver()

    async def _end(self) -> None:
        try:
            await self._run(self._open.close)
        finally:
            self._thread.shutdown(wait=False)

    async def _run(self, call: Callable[..., T], *args: Any) -> T:
        # A cancelled task must wait for the call too, or it would leave the output in the middle of a write.
        running = asyncio.get_running_loop().run_in_executor(self._thread, call, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise


class UsageSum:
    """Sums the usage of the rows whose lines of the output file pass. A row has one line, however often it ran."""

    def __init__(self) -> None:
        self._tokens = Counter[str]()

    def read(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the lines, and add the usage of each."""
        for line in lines:
            usage = json.loads(line)["response"]["body"].get("usage") or {}
            # The Responses API has names of its own for the same counts.
            for name, other in (("prompt", "input"), ("completion", "output")):
                self._tokens[other] += usage.get(f"{name}_tokens", usage.get(f"{other}_tokens", 0))
                details = usage.get(f"{name}_tokens_details", usage.get(f"{other}_tokens_details")) or {}
                self._tokens["cached"] += details.get("cached_tokens") or 0
                self._tokens["reasoning"] += details.get("reasoning_tokens") or 0
            yield line

    def usage(self) -> BatchUsage:
        """Return the sums so far."""
        return BatchUsage(
            input_tokens=self._tokens["input"],
            input_tokens_details=InputTokensDetails(cached_tokens=self._tokens["cached"]),
            output_tokens=self._tokens["output"],
            output_tokens_details=OutputTokensDetails(reasoning_tokens=self._tokens["reasoning"]),
            total_tokens=self._tokens["input"] + self._tokens["output"],
        )
