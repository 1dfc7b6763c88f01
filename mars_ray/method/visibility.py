"""Build the attention masks of a MARS training forward. One predicate defines visibility, and both masks evaluate it.

The dense boolean mask serves SDPA (for a row) and `tiles` (for a tile). The block mask serves FlexAttention on CUDA.

Source: arXiv 2604.07023, section 3, table in the method section. A clean token sees the clean tokens up to itself. A
noisy token sees its own block up to itself, and the clean tokens of earlier blocks. Examples are packed, so no token
sees another example.
"""

from collections.abc import Callable

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

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


def dense_mask(streams: Streams) -> Tensor:
    """Return the dense mask, bool [R, 1, S, S], True where attention is allowed.

    A padding slot sees itself and the padding before it, so no row of the mask is empty.
    """
    return may_attend(streams, lambda field_RS: field_RS[:, None, :, None], lambda field_RS: field_RS[:, None, None, :])


def flex_mask(streams: Streams) -> BlockMask:
    """Return the same mask for FlexAttention, which skips tiles without any allowed pair."""
    R, S = streams.tokens_RS.shape

    def mask_mod(row: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return may_attend(streams, lambda field_RS: field_RS[row, q], lambda field_RS: field_RS[row, k])

    return create_block_mask(mask_mod, B=R, H=None, Q_LEN=S, KV_LEN=S, device=str(streams.tokens_RS.device))
