"""The stage of a pipeline that answers its rows: what Ray Data runs as one actor (shell).

The actor passes blocks on to the decoders that the stages of the job share, and loads no torch itself.
"""

import pyarrow as pa

from mars_ray.batch.ray.shared_pool import SharedDecoders, SharedPoolSettings
from mars_ray.batch.rows.row_result import failure_in, from_table
from mars_ray.batch.rows.stage_rows import rows_to_answer, with_answers
from mars_ray.batch.run.stage_backlog import StageBacklog
from mars_ray.errors import RunError


class AnsweredRows:
    """Answers the blocks of one stage, several at a time; `rows` is how many will come, where that is known."""

    def __init__(self, pool: SharedPoolSettings, row_format: bytes, *, rows: int | None, raise_errors: bool) -> None:
        self._row_format, self._raise_errors = row_format, raise_errors
        self._backlog = StageBacklog(rows=rows)
        self._decoders = SharedDecoders(pool, self._backlog)

    async def __call__(self, block: pa.Table) -> pa.Table:
        """Return the rows of a block with their answers.

        Raises `RequestError` for a row without an answer if `raise_errors`, and `RunError` when no engine starts.
        """
        self._backlog.arrived += block.num_rows
        answered = await self._decoders.answer(rows_to_answer(block), self._row_format)
        if reason := failure_in(answered):
            raise RunError(reason)
        results = from_table(answered)
        self._backlog.done += len(results)
        self._backlog.tokens += sum(sum(each.tokens) for each in results)
        return with_answers(block, results, raise_errors=self._raise_errors)
