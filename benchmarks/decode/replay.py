"""An engine with random weights that replays the proposals of the bundled model, so its step times are realistic."""

from dataclasses import replace
from typing import cast

from benchmarks.decode.script import Script
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.execution.model_runner import ForwardOutput, ModelRunner
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.engine.kv.slot_allocator import SlotAllocator
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.scheduling.sequence import Sequence
from mars_ray.model.checkpoint import Checkpoint


class ReplayEngine(Engine):
    """An engine that replays scripts; the id of a request is the number of its script."""

    def __init__(self, checkpoint: Checkpoint, options: EngineOptions, scripts: list[Script]) -> None:
        super().__init__(checkpoint, options)
        self._runner: ModelRunner = _Replay(self._runner, self._slots, scripts)


class _Replay:
    """A model runner that runs another one and replaces its proposals by those of the scripts."""

    def __init__(self, runner: ModelRunner, slots: SlotAllocator, scripts: list[Script]) -> None:
        self._runner, self._slots, self._scripts = runner, slots, scripts
        self.mask_samplers = runner.mask_samplers

    def run(self, batch: ForwardBatch) -> ForwardOutput:
        output = self._runner.run(batch)
        tokens, confidences = [], []
        picks = batch.pick_M
        for slot, position in zip(batch.slot_N[picks].tolist(), batch.position_N[picks].tolist(), strict=True):
            sequence = cast(Sequence, self._slots.owner(slot))
            last = len(sequence.tokens) + len(sequence.draft_tokens) - 1
            script = self._scripts[int(sequence.request.id)]
            place = min(position, last) + 1 - sequence.num_prompt_tokens
            said, sure = script.tokens_SW, script.confidences_SW
            column = max(0, position - last)
            place = min(max(0, place), len(said) - 1)
            tokens.append(int(said[place, column]))
            confidences.append(float(sure[place, column]))
        return replace(output, tokens=tokens, confidences=confidences)

    def wait_until_compiled(self) -> None:
        """Wait for the runner."""
        self._runner.wait_until_compiled()

    def close(self) -> None:
        """Close the runner."""
        self._runner.close()
