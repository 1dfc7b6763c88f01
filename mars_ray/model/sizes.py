"""Bounds of the sizes a model may declare: a number in a file costs nothing, the network made of it all memory."""

from collections.abc import Mapping
from typing import Any

from mars_ray.errors import ModelError

LARGEST = {
    "num_hidden_layers": 1 << 10,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "vocab_size": 1 << 22,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 28,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "n_routed_experts": 1 << 12,
}
"""About ten times those of the largest models there are, under the names of transformers."""


def check_sizes(declared: Mapping[str, Any], where: str, names: Mapping[str, str] | None = None) -> None:
    """Raise `ModelError` for a size out of bounds in `declared`, at any depth; `where` is named in the error.

    `names` are what sizes are called in `declared` in place of the names of transformers.
    """
    bounds = LARGEST | {own: LARGEST[name] for name, own in (names or {}).items() if name in LARGEST}
    left: list[Any] = [declared]
    while left:
        match left.pop():
            case dict() as part:
                for name, value in part.items():
                    if name in bounds:
                        _check(where, name, value, bounds[name])
                left += part.values()
            case list() as parts:
                left += parts


def _check(where: str, name: str, value: Any, largest: int) -> None:
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, int | float) and not 0 <= each <= largest:
            raise ModelError(f"{where}: {name} is {each}; it may be 0 to {largest}.")
