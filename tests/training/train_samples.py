"""A tiny run: its records, and its data packed without Ray."""

import json
from collections.abc import Callable
from pathlib import Path

from mars_ray.data.chat import ChatEncoder, Encoded
from mars_ray.data.packed import PackedWriter
from mars_ray.data.packing import Packer
from mars_ray.data.records import parse_record
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.training.config import TrainConfig
from tests.factories.token_rows import pack_report

MakeConfig = Callable[..., TrainConfig]
RECORDS = [{"prompt": f"count to {n}", "response": " ".join(map(str, range(n)))} for n in range(1, 13)] * 8


def pack(config: TrainConfig, start_model: Path, count: int = len(RECORDS)) -> None:
    """Put `count` records, packed, where a run expects them, without Ray."""
    encoder = ChatEncoder(load_checkpoint(start_model).tokenizer)
    encoded = encoder.encode([parse_record(json.dumps(record).encode()) for record in RECORDS[:count]])
    for name in ("train", "heldout"):
        folder = config.output / "data" / name
        folder.mkdir(parents=True)
        packer, writer = Packer(config.data.length), PackedWriter(Path(str(folder)), config.data.length)
        for each in encoded:
            assert isinstance(each, Encoded)
            writer.write(packer.add(each))
        writer.write(packer.finish())
        writer.close(
            pack_report(
                records=count,
                examples=packer.examples,
                tokens=packer.tokens,
                response_tokens=packer.response_tokens,
                rows=writer.rows,
                length=config.data.length,
            )
        )
