"""Put an adapter into the package in 8 bits, if rounding hardly changes its drafts.

    python -m pipelines.ship_adapter runs/smollm2/model --model smollm2 --heldout runs/smollm2/data/heldout

The trained adapter and its 8-bit copy are measured on the same held-out rows, with masks at the tokens of the answers.
The copy is refused if it loses 0.2 points or more of agreement with the model. Otherwise `--adapter` then finds it
under the name of the model.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers.utils import logging

from mars_ray.adapter.card import SHIPPED
from mars_ray.adapter.folder import WEIGHTS_FILE, load_adapter, save_adapter
from mars_ray.adapter.forward import TILED, mask_logits
from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.adapter.loss import sampled
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.data.packed import PackedData
from mars_ray.errors import AdapterError
from mars_ray.measure import machine
from mars_ray.model.checkpoint import load_model
from mars_ray.model.dtype import resolve_dtype
from mars_ray.model.folder import ResolvedModel, open_model
from mars_ray.program import run_program
from pipelines.pipeline_files import write

ROWS_AT_ONCE = 4
POINTS = 0.2
"""Loss of agreement, in percentage points, from which the adapter is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Effect of rounding to 8 bits on the drafts of an adapter."""

    masks: int
    agreement: float
    """Share of the masks whose most likely token equals the model's."""
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
    """Round the adapter, measure both versions, and write the rounded one to the package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path, help="folder of a trained adapter")
    parser.add_argument(
        "--model", default="smollm2", help="model of the adapter, and name of the adapter in the package"
    )
    parser.add_argument("--heldout", type=Path, required=True, help="output of `mars-ray prepare`")
    parser.add_argument("--rows", type=int, default=64, help="maximum number of rows to measure")
    parser.add_argument("--to", type=Path, help="folder to write instead of the package")
    parser.add_argument("--json", type=Path, help="file for the measurements")
    args = parser.parse_args()
    logging.disable_progress_bar()
    model = open_model(args.model)
    base = model.folder
    trained = load_adapter(args.adapter, base)
    target = args.to or SHIPPED / args.model
    with TemporaryDirectory() as scratch:
        rounded = Path(scratch) / "int8"
        save_adapter(trained.lora, trained.card, rounded, dtype=torch.int8)
        pair = trained.lora, load_adapter(rounded, base).lora
        sizes = [(folder / WEIGHTS_FILE).stat().st_size for folder in (args.adapter, rounded)]
    rounding = measure(model, pair, PackedData(args.heldout), args.rows, trained.card.block, sizes)
    summary = (
        f"{rounding.masks:,} masks: agreement {rounding.agreement:.2%}, in 8 bits {rounding.agreement_int8:.2%}; "
        f"{rounding.changed:.2%} predict another token; {rounding.bytes / 1e6:.1f} MB, in 8 bits "
        f"{rounding.bytes_int8 / 1e6:.1f} MB."
    )
    if args.json:
        write(args.json, [json.dumps({"rounding": asdict(rounding), "machine": machine()}, indent=2)])
    if rounding.points >= POINTS:
        raise AdapterError(f"{args.adapter} loses too much in 8 bits: {summary} Ship it in bfloat16.")
    target.parent.mkdir(parents=True, exist_ok=True)
    save_adapter(trained.lora, trained.card, target, dtype=torch.int8, replace=True)
    print(f"{summary} The adapter is in {target}.")


@torch.inference_mode()
def measure(
    model: ResolvedModel, pair: tuple[GatedLoRA, GatedLoRA], data: PackedData, rows: int, block: int, sizes: list[int]
) -> Rounding:
    """Compare both adapters in `pair` at the same masks; the second one has 8 bits."""
    dtype = resolve_dtype("auto", model.parameters, "cpu").name
    network = load_model(model, dtype=getattr(torch, dtype)).network
    network.set_attn_implementation(TILED)
    for lora in pair:
        lora.attach(network)
    masks = agreed = agreed_int8 = changed = 0
    for start in range(0, min(rows, len(data)), ROWS_AT_ONCE):
        numbers = range(start, min(start + ROWS_AT_ONCE, rows, len(data)))
        streams = mask_streams(data.rows(numbers), masks=block - 1)
        logits = [mask_logits(network, lora, streams) for lora in pair]
        model_M = logits[0].teacher_MV.argmax(dim=-1)
        token_M, int8_M = (sampled(network, *outputs).token_M for outputs in zip(pair, logits, strict=True))
        masks += len(model_M)
        agreed += int((token_M == model_M).sum())
        agreed_int8 += int((int8_M == model_M).sum())
        changed += int((token_M != int8_M).sum())
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
