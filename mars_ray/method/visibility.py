"""Build the attention masks of a MARS training forward. One predicate defines visibility, and all masks evaluate it.

Source: arXiv 2604.07023, section 3, table in the method section. A clean token sees the clean tokens up to itself. A
noisy token sees its own block up to itself, and the clean tokens of earlier blocks. Examples are packed, so no token
sees another example.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mars_ray.method.streams import Streams

Select = Callable[[Tensor], Tensor]
"""Selects the values of queries, or those of keys, from a field [R, S] of the streams."""


def may_attend(streams: Streams, query: Select, key: Select) -> Tensor:
    """Return whether each query may attend to each key. What `query` and `key` select must broadcast together."""
    same_example = query(streams.example_RS) == key(streams.example_RS)
    causal = key(streams.position_RS) <= query(streams.position_RS)
    same_block = query(streams.block_RS) == key(streams.block_RS)
    earlier_block = key(streams.block_RS) < query(streams.block_RS)
    query_noisy, key_noisy = query(streams.noisy_RS), key(streams.noisy_RS)
    seen_by_clean = ~key_noisy & causal
    seen_by_noisy = (key_noisy & same_block & causal) | (~key_noisy & earlier_block)
    return same_example & ((query_noisy & seen_by_noisy) | (~query_noisy & seen_by_clean))


def dense_mask(streams: Streams, query: slice = slice(None), key: slice = slice(None)) -> Tensor:
    """Return the dense mask of some slots of each row, bool [R, 1, Q, K], True where attention is allowed.

    A padding slot sees itself and the padding before it, so no row of the mask is empty.
    """
    return may_attend(
        streams, lambda field_RS: field_RS[:, None, query, None], lambda field_RS: field_RS[:, None, None, key]
    )


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to the scores: 0 where attention is allowed, -inf elsewhere.

    SDPA would make it from a boolean mask again in each layer.
    """
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
