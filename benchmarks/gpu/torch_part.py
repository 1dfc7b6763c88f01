"""Measure our engine's torch runner and a training step on one device, without vLLM.

    python -m benchmarks.gpu.torch_part --device cuda --json torch.json

Equality: the engine's greedy answers in float32 against the reference decoder's, on the same device. Steps: the time of
an engine step by its parts, in bfloat16, next to the modelled time of a step of the same size. Requests go on after the
end of their answers, so the tokens per step are not those of real answers. Training: steps of the whole model, their
time and their memory.

Besides torch and transformers this needs accelerate, llguidance, psutil, pydantic, rich, scipy and universal-pathlib.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator

from benchmarks.gpu.lines import append
from benchmarks.gpu.prompts import prompts_of
from benchmarks.gpu.settings import AR, CALLERS, MASKS, SMALL_CALLERS, Setting, gpu_of, lookahead_settings, step_model
from benchmarks.training import rows
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import decode_all
from mars_ray.engine.execution.model_runner import ForwardOutput
from mars_ray.engine.kv.forward_batch import ForwardBatch
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.machines.step_model import StepModel
from mars_ray.method.loss import StreamLoss
from mars_ray.method.reference import DecodeOptions, decode
from mars_ray.method.streams import mars_streams, random_phases
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.training.step import train_step

WARM_STEPS = 8
BLOCK = 8


def engine_on(device: str, folder: Path, dtype: torch.dtype, max_num_seqs: int) -> Engine:
    """Return an engine that runs through torch, also on a CPU, where it would otherwise choose our kernels."""
    checkpoint = load_checkpoint(folder, dtype=dtype, device=device)
    network = checkpoint.network
    network.__class__ = type("ThroughTorch", (type(network),), {})  # the kernels refuse classes that they do not know
    engine = Engine(checkpoint, EngineOptions(max_num_seqs=max_num_seqs))
    assert engine.kernels.startswith("torch"), engine.kernels
    return engine


def request_of(number: int, prompt: tuple[int, ...], setting: Setting, sampling: SamplingParams) -> Request:
    """Return a request that decodes as `setting` says."""
    parameters = setting.parameters
    if "mode" in parameters:
        parameters["mode"] = Mode(parameters["mode"])
    return Request(id=str(number), prompt=prompt, sampling=sampling, decode=DecodeParams(**parameters))


def equality(folder: Path, device: str, prompts: int, tokens: int) -> dict[str, Any]:
    """Return, for each setting, the number of answers that equal the reference decoder's."""
    reference = load_checkpoint(folder, device=device)
    engine = engine_on(device, folder, torch.float32, prompts)
    chosen = prompts_of(reference.tokenizer, prompts)
    equal = {}
    for setting in (AR, *(setting for masks in MASKS for setting in lookahead_settings(masks))):
        options = DecodeOptions(
            mode="ar" if setting is AR else "threshold",
            threshold=setting.threshold or 1.0,
            block=setting.masks + 1,
            max_tokens=tokens,
            stop_ids=reference.stop_ids,
        )
        expected = decode(reference.network, chosen, options, mask_id=reference.mask_id)
        requests = [request_of(n, p, setting, SamplingParams(max_tokens=tokens)) for n, p in enumerate(chosen)]
        answers = {result.request.id: result.tokens for result in decode_all(engine, requests)}
        equal[setting.name] = sum(answers[str(n)] == answer.tokens for n, answer in enumerate(expected))
    return {"prompts": prompts, "tokens": tokens, "equal": equal}


class StepTimer:
    """Times the parts of an engine's steps: packing, the forward up to its result on the host, and the rest."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._run = engine._forwards.runner.run
        self._pack = engine._forwards.packer.pack
        self._parts_s = {"pack": 0.0, "forward": 0.0}
        self.batches: list[ForwardBatch] = []
        """The inputs of each forward."""
        engine._forwards.runner.run = self._timed_run  # type: ignore[method-assign]
        engine._forwards.packer.pack = self._timed_pack  # type: ignore[method-assign]

    def _timed_run(self, batch: ForwardBatch) -> ForwardOutput:
        started_s = time.perf_counter()
        output = self._run(batch)
        self._parts_s["forward"] += time.perf_counter() - started_s
        self.batches.append(batch)
        return output

    def _timed_pack(self, *arguments: Any, **named: Any) -> Any:
        started_s = time.perf_counter()
        packed = self._pack(*arguments, **named)
        self._parts_s["pack"] += time.perf_counter() - started_s
        return packed

    def step(self) -> tuple[int, dict[str, float]]:
        """Run one step; return its tokens, and its milliseconds in all and by part."""
        self._parts_s = {"pack": 0.0, "forward": 0.0}
        started_s = time.perf_counter()
        chunks = self.engine.step()
        step_s = time.perf_counter() - started_s
        errors = [chunk.finished.error for chunk in chunks if chunk.finished and chunk.finished.error]
        if errors:
            raise errors[0]
        parts_s = {"step": step_s, **self._parts_s, "rest": step_s - sum(self._parts_s.values())}
        return sum(len(chunk.tokens) for chunk in chunks), {name: 1e3 * seconds for name, seconds in parts_s.items()}


def steps(timer: StepTimer, model: StepModel, callers: int, setting: Setting, count: int) -> dict[str, Any]:
    """Return the time of decoding steps by part, and the modelled time of steps of the same size."""
    engine = timer.engine
    cuda = engine._checkpoint.network.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    most = (3 * WARM_STEPS + count) * (setting.masks + 1)
    sampling = SamplingParams(max_tokens=most, ignore_eos=True)
    for number, prompt in enumerate(prompts_of(engine._checkpoint.tokenizer, callers)):
        engine.add(request_of(number, prompt, setting, sampling))
    timer.batches.clear()
    running = engine._scheduler.running
    while len(timer.batches) < WARM_STEPS or not all(sequence.num_output_tokens for sequence in running):
        timer.step()
    timer.batches.clear()
    measured = [timer.step() for _ in range(count)]
    assert engine.running == callers, "an answer ended during the measurement"
    for number in range(callers):
        engine.cancel(str(number))
    engine.step()
    engine.clear_cache()
    tokens = sum(step_tokens for step_tokens, _ in measured)
    positions = sum(len(batch.id_N) for batch in timer.batches) / count
    kv_tokens = sum(batch.kv_tokens for batch in timer.batches) / count
    step_s = sum(parts["step"] for _, parts in measured) / 1e3
    modelled_s = model.seconds(
        num_seqs=callers, positions=round(positions), kv_tokens=round(kv_tokens), prompt_tokens=0
    )
    return {
        "setting": setting.name,
        "callers": callers,
        "tokens_per_s": tokens / step_s,
        "tokens_per_step": tokens / (count * callers),
        "positions": positions,
        "ms": {part: median(parts[part] for _, parts in measured) for part in ("step", "pack", "forward", "rest")},
        "modelled_ms": 1e3 * modelled_s,
        "modelled_tokens_per_s": tokens / count / modelled_s,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if cuda else None,
    }


def training(folder: Path, device: str, count: int, length: int, steps: int) -> dict[str, Any]:
    """Return the losses, the seconds after the first step, and the peak memory of training steps."""
    checkpoint = load_checkpoint(folder, attention="sdpa", device=device)
    loss = StreamLoss(checkpoint.network.train())
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16")
    adamw = torch.optim.AdamW(loss.parameters(), lr=1e-5, betas=(0.9, 0.95), fused=True)
    wrapped, optimizer = accelerator.prepare(loss, adamw)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for number in range(steps + 1):
        packed = rows(number, count, length, checkpoint.mask_id)
        phase_RT = random_phases(packed, BLOCK, torch.Generator().manual_seed(number))
        streams = mars_streams(packed, block=BLOCK, mask_id=checkpoint.mask_id, phase_RT=phase_RT)
        started_s = time.perf_counter()
        result = train_step(wrapped, optimizer, [streams], accelerator, ar_weight=1.0, clip_norm=1.0)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started_s)
        losses.append(result.mask_loss)
    return {
        "rows": count,
        "length": length,
        "mask_losses": losses,
        "seconds": seconds[1:],
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None,
    }


def main() -> None:
    """Measure everything and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu", help="entry of `gpus` in machines/figures.yaml; default: the device's")
    parser.add_argument("--small", action="store_true", help="a few prompts and steps, to try the program")
    parser.add_argument("--json", type=Path, required=True, help="file of JSON lines to append to")
    arguments = parser.parse_args()
    device, small = arguments.device, arguments.small
    gpu = arguments.gpu or (gpu_of(torch.cuda.get_device_name()) if device == "cuda" else "h100")
    folder = resolve_model(arguments.model)
    sizes = (2, 16) if small else (24, 48)
    append(arguments.json, {"equality": equality(folder, device, *sizes)})
    settings = [AR, *(setting for masks in MASKS for setting in lookahead_settings(masks))]
    callers = SMALL_CALLERS if small else CALLERS
    count = 4 if small else 24
    engine = engine_on(device, folder, torch.bfloat16, max(callers))
    network = engine._checkpoint.network
    model = step_model(gpu, network.config, sum(parameter.numel() for parameter in network.parameters()))
    timer = StepTimer(engine)
    for number in callers:
        for setting in settings:
            append(arguments.json, {"step": steps(timer, model, number, setting, count)})
    rows_of_step = (2, 256, 1) if small else (8, 1024, 6)
    append(arguments.json, {"training": training(folder, device, *rows_of_step)})


if __name__ == "__main__":
    run_program("benchmarks.gpu.torch_part", main)
