"""The tensors of the cache do what the plain lists of a shadow cache do."""

from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen2Config

from mars_ray.engine.kv.cache import SlotKVCache, kv_shape
from mars_ray.engine.kv.slot_allocator import CacheOp, Copy, Resize
from tests.engine.engine_parts import ShadowCache

CONFIG = Qwen2Config(
    vocab_size=10, hidden_size=8, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=3
)


def empty_cache() -> SlotKVCache:
    return SlotKVCache(CONFIG, torch.float32, torch.device("cpu"))


@torch.inference_mode()
def write(cache: SlotKVCache, slot: int, position: int, token: int) -> None:
    """Write another number into every layer, head and component, and into keys and values."""
    for number, part in enumerate(part for layer in cache.layers for part in layer):
        part[slot, :, position] = mark(number, token)


def mark(number: int, token: int) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float32).view(2, 3) + 10 * number + 100 * token


def agrees(cache: SlotKVCache, shadow: ShadowCache) -> bool:
    return all(
        torch.equal(part[slot, :, position], mark(number, token))
        for number, part in enumerate(part for layer in cache.layers for part in layer)
        for slot, tokens in enumerate(shadow.slots)
        for position, token in enumerate(tokens)
        if token is not None
    )


@st.composite
def operations_of(draw: st.DrawFn, slots: int, width: int) -> CacheOp:
    slot, length = st.integers(0, slots - 1), st.integers(0, width)
    one, other = draw(slot), draw(slot)
    if one == other or draw(st.integers(0, 3)) == 0:
        return Resize(draw(st.integers(1, 4)), draw(st.integers(1, 6)))
    return Copy(one, other, draw(length))


@given(st.data())
def test_copies_and_sizes_move_what_was_written(data: st.DataObject) -> None:
    cache, shadow, token = empty_cache(), ShadowCache(), 0
    batch: list[CacheOp] = [Resize(3, 4)]
    for _ in range(data.draw(st.integers(1, 6))):
        cache.apply(batch)
        shadow.apply(batch)
        assert agrees(cache, shadow)
        for slot in range(len(shadow.slots)):
            for position in range(data.draw(st.integers(0, shadow.width))):
                token += 1
                write(cache, slot, position, token)
                shadow.write(slot, position, [token])
        batch = [data.draw(operations_of(len(shadow.slots), shadow.width))]
    cache.apply(batch)
    shadow.apply(batch)
    assert agrees(cache, shadow)


def test_a_cache_for_which_memory_was_short_can_be_resized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = empty_cache()
    cache.resize(2, 3)
    zeros, made = torch.zeros, count()

    def short(*arguments: Any, **named: Any) -> torch.Tensor:
        if next(made) == 3:
            raise MemoryError
        return zeros(*arguments, **named)

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(torch, "zeros", short)
        cache.resize(4, 4)
    for slots, width in ((0, 0), (2, 3)):
        cache.resize(slots, width)
        assert [keys.shape[::2] for keys, _ in cache.layers] == [(slots, width)] * 2


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=5))
def test_every_size_holds_numbers_and_at_least_what_was_asked_for(sizes: list[tuple[int, int]]) -> None:
    cache = empty_cache()
    for slots, width in sizes:
        cache.apply([Resize(slots, width)])
        layers, heads, size = kv_shape(CONFIG)
        assert len(cache.layers) == layers
        for part in (part for layer in cache.layers for part in layer):
            assert part.shape[0] >= slots and part.shape[2] >= width
            assert (part.shape[1], part.shape[3]) == (heads, size)
            assert part.isfinite().all()


def test_the_shape_is_that_of_key_heads_even_where_the_config_leaves_them_open() -> None:
    assert kv_shape(CONFIG) == (2, 2, 3)
    open_config = Qwen2Config(hidden_size=8, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=None)
    assert kv_shape(open_config) == (1, 4, 2)
