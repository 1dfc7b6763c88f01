"""How many rows a block of a job has, and how many blocks a decoder works on at a time.

A block leaves its decoder when its last row is done, and what has not left is lost when the job is stopped. So blocks
are small where there are few rows; where there are many, each block costs some time and memory of Ray.
"""

import math

SMALL_BLOCKS = 1024
"""Blocks that a job is cut into while they have fewer than `BLOCK_ROWS`."""
BLOCK_ROWS = 64
"""Rows of a block as a rule."""
BLOCKS = 4096
"""Blocks of a job at most, for Ray keeps some kilobytes of each: a job has larger ones rather than more."""
BLOCKS_PER_WORKER = 4
"""Blocks for each worker at least."""
CALLS = 8
"""Blocks that a decoder works on at a time, at least."""
ROWS_AT_ONCE = 320
"""Rows that a decoder works on at a time, at least: more than an engine decodes together (32 on a CPU, 256 on a GPU)
and than wait in it, so that it never runs empty, however long single rows take."""


def rows_per_block(total: int, workers: int) -> int:
    """Return the rows of a block for a job of `total` rows."""
    small = min(BLOCK_ROWS, math.ceil(total / SMALL_BLOCKS))
    return max(1, min(max(small, math.ceil(total / BLOCKS)), math.ceil(total / (BLOCKS_PER_WORKER * workers))))


def calls_per_decoder(block_rows: int) -> int:
    """Return the blocks of so many rows that a decoder works on at a time."""
    return max(CALLS, math.ceil(ROWS_AT_ONCE / block_rows))
