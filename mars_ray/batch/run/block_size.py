"""Choose the number of rows in a block, and of blocks that a decoder works on at a time.

A block leaves its decoder when its last row is done, and a stopped job loses the blocks that have not left. So blocks
are small in small jobs. Large jobs have larger blocks, because each costs some time and memory of Ray.
"""

import math

SMALL_BLOCKS = 1024
"""Most blocks of a job with blocks of fewer than `BLOCK_ROWS` rows."""
BLOCK_ROWS = 64
"""Usual number of rows in a block."""
BLOCKS = 4096
"""Most blocks of a job, because Ray keeps some kilobytes for each. Larger jobs have larger blocks."""
BLOCKS_PER_WORKER = 4
"""Fewest blocks for each worker."""
CALLS = 8
"""Fewest blocks that a decoder works on at a time."""
ROWS_AT_ONCE = 320
"""Fewest rows that a decoder works on at a time. An engine decodes up to 32 together on a CPU and 256 on a GPU, so it
never runs empty, even if single rows take long."""


def rows_per_block(total: int, workers: int) -> int:
    """Return the number of rows in a block for a job of `total` rows."""
    small = min(BLOCK_ROWS, math.ceil(total / SMALL_BLOCKS))
    return max(1, min(max(small, math.ceil(total / BLOCKS)), math.ceil(total / (BLOCKS_PER_WORKER * workers))))


def calls_per_decoder(block_rows: int) -> int:
    """Return the number of blocks that a decoder works on at a time."""
    return max(CALLS, math.ceil(ROWS_AT_ONCE / block_rows))
