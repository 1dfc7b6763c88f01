"""One forward of an unmodified HF decoder over the cache, compiled where a compiler is present.

In:    packed indices, the cache.
Out:   at each picked position the most likely token, its probability, and the logits.
Never: knows a sequence.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mars_ray.engine.attention import ATTENTION, Layers, Rectangle, visible
from mars_ray.engine.kv_cache import SlotKVCache
from mars_ray.engine.packer import Packed
from mars_ray.errors import ModelError

log = logging.getLogger(__name__)

Forward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(slots=True)
class Window:
    """What a forward gave at the M picked positions. The mask token has no chance at any."""

    tokens: list[int]
    """The most likely one."""
    confidences: list[float]
    """Its probability."""
    logits_MV: Tensor
    """float32."""


class Runner:
    """Runs `network`, whose attention it replaces."""

    def __init__(self, network: PreTrainedModel, cache: SlotKVCache, *, mask_id: int, compiled: bool) -> None:
        capped = getattr(network.config.get_text_config(), "attn_logit_softcapping", None)
        if capped is not None:
            raise ModelError(f"The model caps its attention logits at {capped}, which the engine's attention cannot.")
        network.set_attn_implementation(ATTENTION)
        self._network, self._cache, self._mask_id = network, cache, mask_id
        self._compiled = CompiledSteps(self._forward, network) if compiled else None

    @torch.inference_mode()
    def run(self, packed: Packed) -> Window:
        """Run one forward; the keys and values of all its positions are in the cache afterwards."""
        decoding = (
            packed.id_N, packed.row_N, packed.position_N, packed.back_N, packed.where_RP, packed.pick_M, packed.columns
        )  # fmt: skip
        if packed.prompt_where_LQ is not None:
            prompts = (packed.prompt_where_LQ, packed.prompt_row_L, packed.prompt_columns)
            given = self._forward(self._cache.layers, *decoding, *prompts)
        else:
            forward = (self._compiled and self._compiled.get(packed.where_RP)) or self._forward
            given = forward(self._cache.layers, *decoding)
        token_M, confidence_M, logits_MV = given
        return Window(token_M.tolist(), confidence_M.tolist(), logits_MV)

    def wait_until_compiled(self) -> None:
        """Wait until the steps that can be compiled are; return at once without a compiler."""
        if self._compiled:
            self._compiled.wait()

    def close(self) -> None:
        """Stop compiling."""
        if self._compiled:
            self._compiled.close()

    def _forward(
        self,
        layers: Layers,
        id_N: Tensor,
        row_N: Tensor,
        position_N: Tensor,
        back_N: Tensor,
        where_RP: Tensor,
        pick_M: Tensor,
        columns: int,
        prompt_where_LQ: Tensor | None = None,
        prompt_row_L: Tensor | None = None,
        prompt_columns: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = layers[0][0].dtype
        decoding = Rectangle(where_RP, visible(where_RP, position_N, columns, dtype))
        where: dict[str, Any] = {"layers": layers, "row_N": row_N, "position_N": position_N, "back_N": back_N}
        if prompt_where_LQ is not None:
            seen = visible(prompt_where_LQ, position_N, prompt_columns, dtype)
            where |= {"prompts": Rectangle(prompt_where_LQ, seen), "prompt_row_L": prompt_row_L}
        logits_MV = self._network(
            input_ids=id_N[None],
            position_ids=position_N[None],
            use_cache=False,
            logits_to_keep=pick_M,
            decoding=decoding,
            **where,
        ).logits[0].float()  # fmt: skip
        mask = torch.arange(logits_MV.shape[-1], device=logits_MV.device) == self._mask_id
        logits_MV = logits_MV.masked_fill(mask, -torch.inf)
        top_M, token_M = logits_MV.max(dim=-1)
        return token_M, (top_M - logits_MV.logsumexp(dim=-1)).exp(), logits_MV


class CompiledSteps:
    """The decoding step through torch.compile, warmed in a background thread; eager until a variant is ready.

    Sizes are dynamic, but the compiler treats 0 and 1 apart, so there are four variants: one row or several, one
    position or several. A variant is never compiled in the middle of a step: what it meets must fit.
    """

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

    @torch.inference_mode()
    def _warm(self) -> None:
        torch.set_num_threads(self._threads)  # counted by thread, and what is compiled holds for one number only
        for several in ((False, False), (False, True), (True, True), (True, False)):
            if self._closed.is_set():
                return
            compiled = torch.compile(self._forward, dynamic=True, fullgraph=True)
            try:
                # Sizes that differ from one another: the compiler takes equal ones for the same by nature.
                for rows, positions, width, columns in ((5, 6, 512, 77), (3, 9, 1024, 131)):
                    compiled(*self._example(rows if several[0] else 1, positions if several[1] else 1, width, columns))
            except Exception as error:  # no compiler, or one that cannot: eager is always right
                log.warning("steps stay uncompiled: %s", str(error).strip().splitlines()[0])
                return
            self._ready[several] = compiled

    def _example(self, rows: int, positions: int, width: int, columns: int) -> tuple[Any, ...]:
        cache = SlotKVCache(self._network.config, self._network.dtype, self._network.device)
        cache.resize(rows + 7, width)
        device, count = self._network.device, rows * positions
        number_N = torch.arange(count, device=device)
        pick_M = number_N[-max(2, count - 2) :]
        where_RP = number_N.view(rows, positions)
        row_N, position_N = number_N // positions, number_N % positions + columns - positions
        return cache.layers, number_N, row_N, position_N, number_N.clone(), where_RP, pick_M, columns
