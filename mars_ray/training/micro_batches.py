"""Packed rows, laid out as the streams that a run trains on.

Random numbers are drawn for all rows of a step before the rows are split, so they depend neither on the number of
workers nor on the size of a micro-batch.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.method.streams import GPU_MASKS, PackedRows, Streams, clean_stream, mars_streams, random_phases
from mars_ray.training.config import TrainConfig
from mars_ray.training.schedule import block_size, generator_for


class MicroBatches:
    """Makes micro-batches as the config says: blocks, phases, and weights of masks."""

    def __init__(self, config: TrainConfig, steps: int, mask_id: int) -> None:
        """`steps` is the number of steps of the run."""
        self._objective = config.objective
        self._rows = config.optimizer.micro_rows
        self._seed = config.seed
        self._steps = steps
        self._mask_id = mask_id
        self._multiple_of = GPU_MASKS if config.compute.gpu else 1

    def of_step(self, rows: PackedRows, step: int, *, worker: int, workers: int) -> list[Streams]:
        """Return the micro-batches of one of `workers` for a step that trains on `rows`."""
        objective = self._objective
        masks = block_size(step, self._steps, last=objective.masks) if objective.growth else objective.masks
        phase_RT = self._phases(rows, masks, generator_for(self._seed, step))
        # Without the autoregressive loss, `first` is the only option that trains the first token of a response.
        first = objective.ar_weight == 0
        return list(self._cut(rows, masks, phase_RT, range(worker, len(phase_RT), workers), first=first))

    def of_heldout(self, rows: PackedRows) -> Iterator[Streams]:
        """Yield the micro-batches of held-out rows, with all masks of a block."""
        masks = self._objective.masks
        phase_RT = self._phases(rows, masks, generator_for(self._seed, 0))
        return self._cut(rows, masks, phase_RT, range(len(phase_RT)), first=False)

    def _phases(self, rows: PackedRows, masks: int, generator: torch.Generator) -> Tensor:
        if self._objective.phase == "absolute":
            return torch.zeros_like(rows.position_RT)
        return random_phases(rows, masks, generator)

    def _cut(self, rows: PackedRows, masks: int, phase_RT: Tensor, numbers: range, *, first: bool) -> Iterator[Streams]:
        for start in range(0, len(numbers), self._rows):
            cut = list(numbers[start : start + self._rows])
            yield self._streams(rows.select(cut), masks, phase_RT[cut], first=first)

    def _streams(self, rows: PackedRows, masks: int, phase_RT: Tensor, *, first: bool) -> Streams:
        objective = self._objective
        if objective.kind == "ar":
            return clean_stream(rows)
        if objective.adapter:
            return mask_streams(
                rows, masks=masks, phase_RT=phase_RT, decay=objective.decay, multiple_of=self._multiple_of
            )
        return mars_streams(
            rows,
            block=masks,
            mask_id=self._mask_id,
            phase_RT=phase_RT,
            decay=objective.decay,
            first=first,
            multiple_of=self._multiple_of,
        )
