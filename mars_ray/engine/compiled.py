"""The decoding step through torch.compile, warmed in a background thread.

In:    the forward as a function of tensors.
Out:   a compiled one for the sizes at hand, once it is ready; before that, and without a compiler, none.
Never: compiles in the middle of a step.

Sizes are dynamic, so the number of variants does not grow with rows, positions or lengths. The compiler treats a size
of 1 apart, which leaves four: one row or several, one position or several. Inductor keeps what it compiled on disk;
tracing alone is done again in the next process.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.engine.attention import Layers
from mars_ray.engine.kv_cache import SlotKVCache

log = logging.getLogger(__name__)

Forward = Callable[..., tuple[Tensor, Tensor, Tensor]]

VARIANTS = ((1, 1), (1, 6), (5, 6), (5, 1))
"""Rows and positions of the examples, in the order in which they are most missed."""


class CompiledSteps:
    """Compiles `forward` for each variant, one after the other."""

    def __init__(self, forward: Forward, network: PreTrainedModel) -> None:
        self._forward, self._network = forward, network
        self._ready: dict[tuple[bool, bool], Forward] = {}
        self._closed = threading.Event()
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._warm, name="compile", daemon=True)
        self._thread.start()

    def get(self, where_RP: Tensor) -> Forward | None:
        """Return the variant for these rows and positions, if it is ready."""
        rows, positions = where_RP.shape
        return self._ready.get((rows > 1, positions > 1))

    def wait(self) -> None:
        """Wait for all variants."""
        self._thread.join()

    def close(self) -> None:
        """Compile no further variant."""
        self._closed.set()
        self._thread.join()

    def _warm(self) -> None:
        torch.set_num_threads(self._threads)  # counted by thread, and what is compiled holds for one number only
        for rows, positions in VARIANTS:
            if self._closed.is_set():
                return
            try:
                self._ready[rows > 1, positions > 1] = compile_step(
                    self._forward, example(self._network, rows, positions)
                )
            except Exception as error:  # no compiler, or one that cannot: eager is always right
                log.warning("steps stay uncompiled: %s", (str(error).strip().splitlines() or [repr(error)])[0])
                return


@torch.inference_mode()
def compile_step(forward: Forward, inputs: tuple[Any, ...]) -> Forward:
    """Compile `forward` ahead of time for every size like those of `inputs`."""

    def step(
        layers: Layers,
        id_N: Tensor,
        row_N: Tensor,
        position_N: Tensor,
        back_N: Tensor,
        where_RP: Tensor,
        pick_M: Tensor,
        column_C: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return forward(layers, id_N, row_N, position_N, back_N, where_RP, pick_M, column_C)

    # Sizes only: weights, devices and dtypes of one engine do not change, and checking them costs a tenth of a step.
    def sizes(guards: list[Any]) -> list[bool]:
        return [guard.guard_type == "SHAPE_ENV" for guard in guards]

    compiler: Any = torch.compile(step, fullgraph=True, options={"guard_filter_fn": sizes})
    compiled = compiler.aot_compile((inputs, {}))
    compiled.disable_guard_check()
    done: Forward = compiled
    return done


@torch.inference_mode()
def example(network: PreTrainedModel, rows: int, positions: int) -> tuple[Any, ...]:
    """Return inputs with a cache of their own. Sizes that are equal, or 1, would be taken for such by nature."""
    width, columns = 512, 77
    cache = SlotKVCache(network.config, network.dtype, network.device)
    cache.resize(rows + 7, width)
    count = rows * positions
    number_N = torch.arange(count, device=network.device)
    where_RP = number_N.view(rows, positions)
    pick_M = number_N[-max(2, count - 2) :].clone()
    column_C = torch.arange(columns, device=network.device)
    row_N, position_N, back_N = number_N // positions, number_N % positions + columns - positions, number_N.clone()
    dynamic = [(part, size) for layer in cache.layers for part in layer for size in (0, 2)]
    dynamic += [(tensor, 0) for tensor in (number_N, row_N, position_N, back_N, pick_M)] if count > 1 else []
    dynamic += [(where_RP, size) for size in (0, 1) if where_RP.shape[size] > 1] + [(column_C, 0)]
    for tensor, size in dynamic:
        torch._dynamo.mark_dynamic(tensor, size)
    return cache.layers, number_N, row_N, position_N, back_N, where_RP, pick_M, column_C
