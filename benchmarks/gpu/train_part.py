"""Train an adapter for some minutes and keep the best one by held-out acceptance.

    python -m benchmarks.gpu.train_part --model smollm2 --data train.npz --output adapter --json train.json

The data come from `benchmarks.gpu.packed_file`; their last sequences are held out. Learning rate and block size follow
the share of the time that has passed. If the memory is too small for a step, its rows are halved. The adapter is stored
in 8 bits, in less than 16 MiB, so its rank is the largest that fits, up to 32.

A line has the tokens per second of the training steps since the line before, and MFU: the operations that the model
needs, divided by those of the GPU's data sheet. A clean token needs 2 N, for N weights in the linear layers. A mask
needs 4 N, since frozen weights have no gradients, 6 for each number of the adapter, and 6 for each weight of the output
embedding, teacher included. Attention needs 4 numbers of a query for each key that is seen, and three times this at
masks, which have a backward.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from benchmarks.gpu.lines import append
from benchmarks.gpu.packed_file import PackedFile, read_packed_file
from benchmarks.gpu.settings import gpu_of
from mars_ray.adapter.card import AdapterCard, resolve_adapter
from mars_ray.adapter.folder import load_adapter, save_adapter, start_from
from mars_ray.adapter.gated_lora import GatedLoRA, linears_of, new_adapter
from mars_ray.adapter.loss import AdapterLoss, heldout_masks
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.adapter.sampler_head import SamplerHead
from mars_ray.errors import ConfigError, DataError
from mars_ray.machines.step_model import GPUS
from mars_ray.method.heldout import HeldoutLookahead
from mars_ray.method.streams import GPU_MASKS, PADDING, Streams, random_phases
from mars_ray.model.card import library_versions
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.digest import vocabulary_digest, weights_digest
from mars_ray.model.resolve import model_label, resolve_model
from mars_ray.program import run_program
from mars_ray.training.schedule import block_size, generator_for, learning_rate, row_numbers
from mars_ray.training.step import train_step

MASKS = 7
DECAY = 0.9
PEAK_RATE, WARMUP = 1e-3, 0.03
MAX_RANK = 32
MAX_BYTES = 16 << 20
SPARE_BYTES = 512 << 10
"""Room for scales, the mask embeddings and the header of the adapter's file."""
HELDOUT = 32
STAGES = 1000
"""Parts of the time by which learning rate and block size change."""


def rank_for(network: PreTrainedModel) -> int:
    """Return the largest rank, a multiple of 4, whose adapter fits in `MAX_BYTES` with 8 bits a number."""
    with torch.device("meta"):
        sampler = SamplerHead(network.get_input_embeddings().weight.shape[1])
    room = MAX_BYTES - SPARE_BYTES - sum(parameter.numel() for parameter in sampler.parameters())
    a_rank = sum(inputs + outputs for inputs, outputs in linears_of(network, None).values())
    rank = min(MAX_RANK, int(room / a_rank) // 4 * 4)
    if rank < 4:
        raise ConfigError(f"an adapter of rank 4 takes {4 * a_rank / 2**20:.0f} MiB, more than {MAX_BYTES >> 20} MiB.")
    return rank


def flops(network: PreTrainedModel, adapter: GatedLoRA, streams: Streams) -> float:
    """Return the operations that a step needs, counted as the docstring of the module says."""
    config = network.config.get_text_config()
    weights = sum(inputs * outputs for inputs, outputs in linears_of(network, None).values())
    head = network.get_output_embeddings().weight.numel()
    own = sum(parameter.numel() for parameter in adapter.parameters())
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    seen = 4 * config.num_hidden_layers * heads * size
    real_RT = (streams.example_RS != PADDING)[:, streams.noisy :]
    clean_keys = int((streams.position_RS[:, streams.noisy :][real_RT] + 1).sum())
    mask_keys = int((streams.position_RS.flatten()[streams.noisy_slot_M] + 1).sum())
    masks = len(streams.noisy_slot_M)
    clean = 2.0 * weights * int(real_RT.sum()) + seen * clean_keys
    total: float = clean + masks * (4.0 * weights + 6 * own + 6 * head) + 3.0 * seen * mask_keys
    return total


class AdapterTraining:
    """An adapter in training, and its figures since the last line."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Load everything. Raises the errors of `mars_ray.errors` for a missing file or one of another model."""
        self._arguments = arguments
        self._base = resolve_model(arguments.model)
        checkpoint = load_checkpoint(self._base, dtype=torch.bfloat16, device=arguments.device)
        if arguments.data is None:
            raise ConfigError("training needs --data, a file made with benchmarks.gpu.packed_file.")
        self._data: PackedFile = read_packed_file(arguments.data, checkpoint.tokenizer)
        self._heldout = min(HELDOUT, len(self._data) // 4)
        if not self._heldout:
            raise DataError(f"{arguments.data} has {len(self._data)} packed sequences; training needs at least 4.")
        self.rows = min(arguments.rows, len(self._data) - self._heldout)
        self._network = checkpoint.network
        self.adapter = self._adapter()
        accelerator = Accelerator(cpu=arguments.device == "cpu", mixed_precision="bf16")
        loss = AdapterLoss(self._network, self.adapter, 1.0)
        adamw = torch.optim.AdamW(self.adapter.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
        self._accelerator = accelerator
        self._loss: nn.Module
        self._loss, self._optimizer = accelerator.prepare(loss, adamw)
        self._digest = weights_digest(self._base)
        self.steps = self.tokens = 0
        self._line_tokens = 0
        self._line_flops = self._line_s = 0.0
        self._losses: tuple[float, float] = (0.0, 0.0)
        self._best = 0.0

    def _adapter(self) -> GatedLoRA:
        start = resolve_adapter(self._arguments.adapter)
        if start is None:
            rank = rank_for(self._network)
            return new_adapter(self._network, rank=rank, alpha=2.0 * rank, masks=MASKS, names=None)
        shape = load_adapter(start, self._base).lora.shape
        names = sorted({name.rpartition(".")[2] for name in shape.linears})
        adapter = new_adapter(self._network, rank=shape.rank, alpha=shape.alpha, masks=shape.masks, names=names)
        start_from(adapter, start)
        return adapter

    def _streams(self, numbers: list[int], masks: int, seed: int) -> Streams:
        rows = self._data.rows(numbers)
        phase_RT = random_phases(rows, masks, generator_for(0, seed))
        return mask_streams(rows, masks=masks, phase_RT=phase_RT, decay=DECAY, multiple_of=GPU_MASKS)

    def step(self, share: float) -> None:
        """Train one step; `share` of the time has passed. Raises `torch.OutOfMemoryError` if one row is too much."""
        begun_s = time.perf_counter()
        stage = min(STAGES - 1, int(share * STAGES))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(stage, STAGES, peak=PEAK_RATE, warmup=WARMUP)
        masks = MASKS if self._arguments.adapter else block_size(stage, STAGES, last=MASKS)
        trained = len(self._data) - self._heldout
        while True:
            numbers = row_numbers(self.steps, trained, batch_rows=self.rows, seed=0)
            streams = self._streams(numbers, masks, self.steps)
            try:
                result = train_step(
                    self._loss, self._optimizer, [streams], self._accelerator, ar_weight=1.0, clip_norm=1.0
                )
                break
            except torch.OutOfMemoryError:
                if self.rows == 1:
                    raise
            self.rows //= 2
            self._optimizer.zero_grad()
            torch.cuda.empty_cache()
        self.steps += 1
        self._losses = (result.mask_loss or 0.0, result.ar_loss)
        tokens = int((streams.example_RS[:, streams.noisy :] != PADDING).sum())
        self.tokens += tokens
        self._line_tokens += tokens
        self._line_flops += flops(self._network, self.adapter, streams)
        self._line_s += time.perf_counter() - begun_s

    def line(self) -> dict[str, Any]:
        """Measure the held-out sequences, keep the adapter if it is the best, and return the figures."""
        numbers = list(range(len(self._data) - self._heldout, len(self._data)))[: max(1, self.rows)]
        streams = self._streams(numbers, MASKS, -1).to(self._arguments.device)
        with self._accelerator.autocast():
            ahead = HeldoutLookahead.of(heldout_masks(self._network, self.adapter, streams))
        best = ahead.tokens_per_forward > self._best
        if best:
            self._best = ahead.tokens_per_forward
            self._save()
        peak = 1e12 * GPUS[self._arguments.gpu].bf16_tflops
        figures = {
            "steps": self.steps,
            "rows": self.rows,
            "rank": self.adapter.shape.rank,
            "tokens_per_s": round(self._line_tokens / self._line_s),
            "mfu": round(self._line_flops / self._line_s / peak, 4),
            "loss": round(self._losses[0], 4),
            "heldout_tokens_per_forward": round(ahead.tokens_per_forward, 3),
            "heldout_agreement": [round(share, 3) for share in ahead.by_offset],
            "best": best,
        }
        if self._arguments.device == "cuda":
            figures["peak_mib"] = torch.cuda.max_memory_allocated() >> 20
        self._line_tokens = 0
        self._line_flops = self._line_s = 0.0
        return figures

    def _save(self) -> None:
        card = AdapterCard(
            block=self.adapter.shape.masks + 1,
            objective={"growth": not self._arguments.adapter, "phase": "random", "decay": DECAY, "distill": 1.0},
            base_model=model_label(self._arguments.model, self._base),
            base_digest=self._digest,
            base_vocabulary=vocabulary_digest(self._base),
            data=self._arguments.data.name,
            examples=len(self._data),
            tokens=self.tokens,
            steps=self.steps,
            seed=0,
            versions=library_versions(),
            losses={"mask": self._losses[0], "ar": self._losses[1]},
        )
        save_adapter(self.adapter, card, self._arguments.output, dtype=torch.int8, replace=True)


def main() -> None:
    """Train, and append a line every so often."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--adapter", help="adapter of the model to begin with; default: a new one")
    parser.add_argument("--data", type=Path, help="file of benchmarks.gpu.packed_file")
    parser.add_argument("--output", type=Path, required=True, help="folder of the best adapter")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--lines", type=int, default=15, help="number of lines, each with a measurement")
    parser.add_argument("--rows", type=int, default=64, help="packed sequences per step")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu", help="entry of `gpus` in machines/figures.yaml, for MFU; default: the device's")
    parser.add_argument("--json", type=Path, required=True, help="file of JSON lines to append to")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("torch finds no GPU. Try the program with --device cpu.")
    arguments.gpu = arguments.gpu or (gpu_of(torch.cuda.get_device_name()) if arguments.device == "cuda" else "h100")
    torch.manual_seed(0)
    training = AdapterTraining(arguments)
    begun_s = time.perf_counter()
    lines = 0
    while lines < arguments.lines:
        training.step((time.perf_counter() - begun_s) / arguments.seconds)
        if time.perf_counter() - begun_s >= arguments.seconds * (lines + 1) / arguments.lines:
            lines += 1
            append(arguments.json, {"train": training.line()})


if __name__ == "__main__":
    run_program("benchmarks.gpu.train_part", main)
