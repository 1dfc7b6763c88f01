"""Rows of tokens laid out by hand, and the report of packing."""

from collections.abc import Sequence
from typing import Any

import torch

from mars_ray.data.packed import PackReport
from mars_ray.data.source_version import SourceVersion
from mars_ray.method.streams import PADDING, PackedRows

MASK_ID = 63
VOCABULARY = 64


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


def pack_report(**fields: Any) -> PackReport:
    usual: dict[str, Any] = {
        "records": 1,
        "source": SourceVersion(bytes=1, stamp="1", digest="0" * 16),
        "dropped": 0,
        "drop_reasons": (),
        "truncated": 0,
        "examples": 1,
        "tokens": 1,
        "response_tokens": 1,
        "fill": 1.0,
        "seconds": 1.0,
        "tokens_per_s": 1.0,
    }
    return PackReport(**(usual | fields))
