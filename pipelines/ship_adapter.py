"""Put an adapter into the package in 8 bits, if rounding keeps its drafts.

    python -m pipelines.ship_adapter runs/smollm2/model --model smollm2 --heldout runs/smollm2/data/heldout

The adapter as it was trained and the one in 8 bits look at the same held-out rows, with masks at the tokens of the
answers. Where 8 bits lose 0.1 points or more of their agreement with the model, nothing is put anywhere. Afterwards
`--adapter` finds it under the name of the model.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from mars_ray.adapter.card import SHIPPED
from mars_ray.adapter.folder import WEIGHTS_FILE, load_adapter, save_adapter
from mars_ray.adapter.forward import ATTENTION, mask_logits
from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.adapter.loss import sampled
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.data.packed import PackedData
from mars_ray.errors import AdapterError
from mars_ray.measure import machine
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from pipelines.pipeline_files import write

ROWS_AT_ONCE = 4
POINTS = 0.1
"""Largest accepted loss of agreement, in percentage points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Effect of 8 bits on the drafts of an adapter."""

    masks: int
    agreement: float
    """Share of the masks whose most likely token is that of the model."""
    agreement_int8: float
    changed: float
    """Share of the masks whose most likely token changes with 8 bits."""
    bytes: int
    bytes_int8: int

    @property
    def points(self) -> float:
        """Percentage points of agreement lost; negative if agreement grows."""
        return 100 * (self.agreement - self.agreement_int8)


def main() -> None:
    """Round, measure, and put it into the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path, help="folder of a trained adapter")
    parser.add_argument("--model", default="smollm2", help="the model of the adapter, and its name in the package")
    parser.add_argument("--heldout", type=Path, required=True, help="output of `mars-ray prepare`")
    parser.add_argument("--rows", type=int, default=64, help="most rows to measure")
    parser.add_argument("--to", type=Path, help="folder to write, instead of the package")
    parser.add_argument("--json", type=Path, help="file for the measurements")
    given = parser.parse_args()
    base = resolve_model(given.model)
    trained = load_adapter(given.adapter, base)
    target = given.to or SHIPPED / given.model
    with TemporaryDirectory() as scratch:
        rounded = Path(scratch) / "int8"
        save_adapter(trained.lora, trained.card, rounded, dtype=torch.int8)
        pair = trained.lora, load_adapter(rounded, base).lora
        sizes = [(folder / WEIGHTS_FILE).stat().st_size for folder in (given.adapter, rounded)]
    found = measure(base, pair, PackedData(given.heldout), given.rows, trained.card.block, sizes)
    said = (
        f"{found.masks:,} masks: agreement {found.agreement:.2%}, in 8 bits {found.agreement_int8:.2%}; "
        f"{found.changed:.2%} say another token; {found.bytes / 1e6:.1f} MB, in 8 bits {found.bytes_int8 / 1e6:.1f} MB."
    )
    if given.json:
        write(given.json, [json.dumps({"rounding": asdict(found), "machine": machine()}, indent=2)])
    if found.points >= POINTS:
        raise AdapterError(f"{given.adapter} loses too much in 8 bits: {said} Ship it in bfloat16.")
    target.parent.mkdir(parents=True, exist_ok=True)
    save_adapter(trained.lora, trained.card, target, dtype=torch.int8, replace=True)
    print(f"{said} It is in {target}.")


@torch.inference_mode()
def measure(
    base: Path, pair: tuple[GatedLoRA, GatedLoRA], data: PackedData, rows: int, block: int, sizes: list[int]
) -> Rounding:
    """Compare both adapters of `pair`, the second in 8 bits, at the same masks."""
    network = load_checkpoint(base, dtype=torch.bfloat16).network
    network.set_attn_implementation(ATTENTION)
    for lora in pair:
        lora.attach(network)
    masks = agreed = agreed_int8 = changed = 0
    for start in range(0, min(rows, len(data)), ROWS_AT_ONCE):
        some = data.rows(range(start, min(start + ROWS_AT_ONCE, rows, len(data))))
        streams = mask_streams(some, block=block)
        found = [mask_logits(network, lora, streams) for lora in pair]
        model_M = found[0].teacher_MV.argmax(dim=-1)
        one_M, other_M = (sampled(network, lora, each).token_M for lora, each in zip(pair, found, strict=True))
        masks += len(model_M)
        agreed += int((one_M == model_M).sum())
        agreed_int8 += int((other_M == model_M).sum())
        changed += int((one_M != other_M).sum())
    return Rounding(
        masks=masks,
        agreement=agreed / masks,
        agreement_int8=agreed_int8 / masks,
        changed=changed / masks,
        bytes=sizes[0],
        bytes_int8=sizes[1],
    )


if __name__ == "__main__":
    run_program("ship_adapter", main)
