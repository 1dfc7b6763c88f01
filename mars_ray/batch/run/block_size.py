"""Choose the number of rows in a block, and the number of blocks that a decoder works on at a time.

A decoder returns a block when the last row is done, and a stopped job loses the blocks that have not been returned.
Small jobs therefore have small blocks. Large jobs have larger blocks, because each block costs Ray some time and
memory.
"""

import math

SMALL_BLOCKS = 1024
"""Maximum number of blocks in a job whose blocks have fewer than `BLOCK_ROWS` rows."""
BLOCK_ROWS = 64
"""Usual number of rows in a block."""
BLOCKS = 4096
"""Maximum number of blocks in a job, because Ray keeps some kilobytes per block. Larger jobs have larger blocks."""
BLOCKS_PER_WORKER = 4
"""Minimum number of blocks per worker."""
CALLS = 8
"""Minimum number of blocks that a decoder works on at a time."""
ROWS_AT_ONCE = 320
"""Minimum number of rows that a decoder works on at a time. An engine decodes up to 32 rows together on a CPU and 256
on a GPU, so it never runs empty, even if single rows take long."""


def rows_per_block(total: int, workers: int) -> int:
    """Return the number of rows in a block for a job of `total` rows."""
    small = min(BLOCK_ROWS, math.ceil(total / SMALL_BLOCKS))
    return max(1, min(max(small, math.ceil(total / BLOCKS)), math.ceil(total / (BLOCKS_PER_WORKER * workers))))


def calls_per_decoder(block_rows: int) -> int:
    """Return the number of blocks that a decoder works on at a time."""
    return max(CALLS, math.ceil(ROWS_AT_ONCE / block_rows))
