"""Replay the proposals of the bundled model in an engine with random weights, for realistic step times."""

from collections import abc
from dataclasses import replace
from typing import Any, cast

from benchmarks.decode.script import Script
from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.execution.model_runner import ForwardOutput, ModelRunner, PackedAdapter
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.engine.kv.slot_allocator import SlotAllocator
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.model.checkpoint import Checkpoint


class ReplayEngine(Engine):
    """An engine that replays scripts; the id of a request is the number of its script."""

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions, scripts: list[Script]) -> None:
        super().__init__(checkpoint, options)
        self._forwards.runner = _Replay(self._forwards.runner, self._slots, scripts)


class _Replay:
    """A model runner that runs another one and replaces its proposals with those of the scripts."""

    def __init__(self, runner: ModelRunner, slots: SlotAllocator, scripts: list[Script]) -> None:
        self._runner = runner
        self._slots = slots
        self._scripts = scripts

    def pack(self, lora: GatedLoRA) -> PackedAdapter:
        """Pack an adapter for the wrapped runner."""
        return self._runner.pack(lora)

    def use(self, adapters: abc.Sequence[Any]) -> None:
        """Let the wrapped runner use the adapters."""
        self._runner.use(adapters)

    def run(self, batch: ForwardBatch) -> ForwardOutput:
        output = self._runner.run(batch)
        tokens = []
        confidences = []
        picks = batch.pick_M
        for slot, position in zip(batch.slot_N[picks].tolist(), batch.position_N[picks].tolist(), strict=True):
            sequence = cast(Sequence, self._slots.owner(slot))
            last = len(sequence.tokens) + len(sequence.drafts.tokens) - 1
            script = self._scripts[int(sequence.request.id)]
            index = min(position, last) + 1 - sequence.num_prompt_tokens
            script_tokens = script.tokens_SW
            script_confidences = script.confidences_SW
            column = max(0, position - last)
            index = min(max(0, index), len(script_tokens) - 1)
            tokens.append(int(script_tokens[index, column]))
            confidences.append(float(script_confidences[index, column]))
        return replace(output, tokens=tokens, confidences=confidences)

    def close(self) -> None:
        """Close the wrapped runner."""
        self._runner.close()
