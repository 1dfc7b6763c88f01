"""Run one optimizer step: forward and backward over its micro-batches, clip, update; and measure the lookahead.

The loss is divided by the number of labels in the whole step, summed over all micro-batches and workers. The loss
therefore does not depend on how the rows are divided among them.

On a GPU the host only queues work. It waits once a step, for the figures that decide whether the weights are updated.
"""

import contextlib
import ctypes
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from mars_ray.errors import DivergedError
from mars_ray.method.acceptance import confidence
from mars_ray.method.loss import label_weights, training_logits
from mars_ray.method.metric import Metric
from mars_ray.method.streams import Streams


@dataclass(frozen=True, slots=True)
class StepLosses:
    """Mean losses over the labels of one step, before the update."""

    mask_loss: float | None
    """Loss at masks; None for the autoregressive objective, which has no masks."""
    ar_loss: float
    grad_norm: float
    """Norm of the gradient before clipping."""


def train_step(
    loss: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Streams],
    accelerator: Accelerator,
    *,
    ar_weight: float,
    clip_norm: float,
) -> StepLosses:
    """Update the weights once. Raises `DivergedError` if the loss is not finite, in which case the weights do not
    change."""
    device = accelerator.device
    local = torch.stack([label_weights(streams) for streams in batches]).sum(dim=0)
    labels = accelerator.reduce(local.to(device, non_blocking=True))
    totals = torch.where(labels > 0, labels, 1.0)
    weights = accelerator.num_processes * torch.stack([1 / totals[0], ar_weight / totals[1]])
    sums = torch.zeros(2, device=device)
    for number, streams in enumerate(batches, start=1):
        last = number == len(batches)
        with contextlib.nullcontext() if last else accelerator.no_sync(loss):
            with accelerator.autocast():
                both = torch.stack(loss(streams.to(device)))
            # Data parallelism averages the gradients of the workers, but the totals already include all workers.
            accelerator.backward((both * weights).sum())
        sums += both.detach()
    mask_mean, ar_mean = accelerator.reduce(sums) / totals
    clipped = accelerator.clip_grad_norm_(loss.parameters(), clip_norm)
    norm = clipped.full_tensor() if isinstance(clipped, DTensor) else clipped
    masks, mask_loss, ar_loss, grad_norm = to_host(torch.stack([labels[0], mask_mean, ar_mean, norm]))
    if not math.isfinite(mask_loss + ar_loss + grad_norm):
        raise DivergedError(f"mask loss {mask_loss}, AR loss {ar_loss}, gradient norm {grad_norm}")
    optimizer.step()
    optimizer.zero_grad()
    return StepLosses(mask_loss if masks else None, ar_loss, grad_norm)


def to_host(figures: Tensor) -> list[float]:
    """Return the values of a tensor, for which the host waits."""
    return [float(figure) for figure in figures.tolist()]


@dataclass(frozen=True, slots=True)
class HeldoutLookahead:
    """Lookahead of a model at one threshold, on held-out rows."""

    tokens_per_forward: float
    """1 + the mean number of masks accepted in a row, which is at most block - 1."""
    agreement: float | None
    """Share of the accepted tokens that equal the clean stream's prediction; None if no token was accepted."""


@torch.no_grad()  # inference mode would leave gathered weights that cannot be trained
def look_ahead(network: PreTrainedModel, streams: Streams, *, block: int, threshold: float) -> HeldoutLookahead:
    """Measure in one forward how many masks in a row have a probability of at least `threshold`.

    `block` is the block size of `streams`. The measurement is teacher-forced: every block of the noisy stream is a
    position that a decoder could have reached, so the figures are those of a decoder whose earlier tokens are correct.
    """
    labelled_M = torch.cat([streams.noisy_slot_M, streams.clean_slot_M])
    logits_MV = training_logits(network, streams, labelled_M)
    token_M = logits_MV.argmax(dim=-1).tolist()
    confidence_M = confidence(logits_MV, Metric.PROBABILITY).tolist()
    width = streams.tokens_RS.shape[1]
    clean_token: dict[tuple[int, int, int], int] = {}
    masks: dict[tuple[int, int, int], list[tuple[int, int, float]]] = defaultdict(list)
    fields = (streams.example_RS, streams.block_RS, streams.position_RS)
    labelled = (labelled_M, *(field.flatten()[labelled_M] for field in fields))
    figures = (*(field_M.tolist() for field_M in labelled), token_M, confidence_M)
    for slot, example, block_number, position, token, certainty in zip(*figures, strict=True):
        row, column = divmod(slot, width)
        if column < streams.noisy:
            masks[row, example, block_number].append((position, token, certainty))
        else:
            clean_token[row, example, position] = token
    accepted = agreeing = 0
    for (row, example, _), drafts in masks.items():
        for position, token, certainty in drafts[: block - 1]:
            if certainty < threshold:
                break
            accepted += 1
            agreeing += token == clean_token[row, example, position]
    return HeldoutLookahead(1 + accepted / len(masks), agreeing / accepted if accepted else None)


# Options of mallopt, from malloc.h.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
GROWTH_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """Make this process keep the memory that it frees, until the process ends. Without glibc this has no effect.

    Each step frees all its activations. By default glibc returns large blocks to the system at once, and the system
    clears every page again when the next step allocates it; this takes a third of a step with 135 million parameters.
    The peak memory of a run is the same either way.
    """
    if sys.platform != "linux":
        return
    library = ctypes.CDLL(None)
    if hasattr(library, "gnu_get_libc_version"):
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, -1)
        library.mallopt(_TOP_PAD, GROWTH_BYTES)
