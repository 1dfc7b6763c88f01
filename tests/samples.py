"""Small real things the tests share."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mars_ray.method.streams import PADDING, PackedRows

Cli = Callable[..., tuple[int, str, str]]
"""The command line: words in; the exit code, standard output and standard error out."""

MASK_ID = 63
VOCABULARY = 64


def seeds(count: int, quick: int) -> list[Any]:
    """Parameters 0, 1, ...: the first few for every run of the tests, all for `make test-slow` too."""
    return [pytest.param(seed, marks=[pytest.mark.slow] if seed >= quick else []) for seed in range(count)]


def packed(rows: Sequence[Sequence[Sequence[bool]]], seed: int = 0) -> PackedRows:
    """Lay examples out by hand: a row is a list of examples, an example a list saying which token is a response."""
    generator = torch.Generator().manual_seed(seed)
    T = max(sum(map(len, row)) for row in rows)
    shape = (len(rows), T)
    response, example, position = torch.zeros(shape, dtype=torch.bool), torch.full(shape, PADDING), torch.zeros(shape)
    for r, row in enumerate(rows):
        place = 0
        for e, marks in enumerate(row):
            for p, mark in enumerate(marks):
                response[r, place], example[r, place], position[r, place] = mark, e, p
                place += 1
        position[r, place:] = torch.arange(T - place)
    tokens = torch.randint(MASK_ID, shape, generator=generator)
    return PackedRows(tokens_RT=tokens, response_RT=response, example_RT=example, position_RT=position.long())
