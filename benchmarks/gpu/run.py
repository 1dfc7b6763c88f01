"""Measure everything on a GPU, with the modelled figure beside each measured one.

    python -m benchmarks.gpu.run --json out/gpu.jsonl
    python -m benchmarks.gpu.run --part steps --part answers --engines stock,mars-7 --json out/gpu.jsonl
    TRITON_INTERPRET=1 python -m benchmarks.gpu.on_cpu benchmarks.gpu.run --device cpu --small --json try.jsonl

`curve`: the GPU's ceilings, and the forward of our torch runner by rows and positions, eager and as a CUDA graph.
`steps`: a step of vLLM by callers, with random weights. `answers`: answers and speed of a trained model in vLLM.
`torch`: the answers of our engine, its steps, and training. On an H200 they took 51, 105, 55 and 91 seconds, and
importing vLLM 20. `train`, with `--data`: an adapter is trained for `--seconds`, and the best one is kept next to the
figures. Each figure is a line of the file at once, so a run that is cut keeps what it had. A run with the same file
adds to it, and prints only its own figures.
"""

import argparse
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config

from benchmarks.gpu.forked import Measurement, import_vllm, run
from benchmarks.gpu.lines import append, last_run, read_lines
from benchmarks.gpu.settings import AR, CALLERS, SHAPES, SMALL_CALLERS, gpu_of, step_model
from benchmarks.gpu.vllm_options import GRAPHS, EngineKind
from mars_ray.errors import ConfigError
from mars_ray.machines.step_model import StepModel
from mars_ray.measure import machine
from mars_ray.model.folder import count_parameters
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program

PARTS = ("curve", "steps", "answers", "torch", "train")
LIMITS_S = {"curve": 90, "steps": 70, "answers": 90, "torch": 120}
"""Limit of each measurement of a part."""
TRAIN_SPARE_S = 120
"""Time that training may take beside its `--seconds`: to load, to measure and to store the adapter."""
TOKENS_PER_SEQ = 160
"""Mean number of cached tokens of a request: its prompt, and half of its answer."""
TIE = 0.05
"""Difference of the two highest log-probabilities below which bfloat16 kernels may choose either token."""


def plan(arguments: argparse.Namespace, folder: Path) -> Iterator[Measurement]:
    """Yield the measurements of the chosen parts."""
    small, device = arguments.small, arguments.device
    callers = ",".join(map(str, SMALL_CALLERS if small else CALLERS))
    shapes = ["tiny"] if small else [shape for shape in SHAPES if shape != "tiny"]
    common = ["--device", device, "--json", str(arguments.json)]
    vllm = ["--callers", callers, "--graphs", arguments.graphs, *common]
    answers = ["--folder", str(folder), *(["--answers", "2", "--tokens", "12", "--rounds", "1"] if small else ())]
    adapter = ["--adapter", arguments.adapter] if arguments.adapter else []
    data = ["--data", str(arguments.data)] if arguments.data else []
    for part in arguments.part or [part for part in PARTS if part != "train" or data]:
        if part == "train":
            words = ["--model", str(folder), "--gpu", arguments.gpu, "--seconds", str(arguments.seconds), *data]
            words += ["--output", str(arguments.json.parent / "adapter"), *adapter, *common]
            words += ["--rows", "2", "--lines", "2"] if small else []
            yield Measurement(part, arguments.seconds + TRAIN_SPARE_S, "train_part", words)
            continue
        limit_s = LIMITS_S[part]
        if part == "curve":
            yield Measurement(part, limit_s, "curve", ["--shapes", *shapes, *common])
        elif part == "torch":
            words = ["--model", str(folder), "--gpu", arguments.gpu, *["--small"] * small, *common]
            yield Measurement(part, limit_s, "torch_part", words)
        elif part == "steps":
            for shape in shapes:
                for engine in arguments.engines:
                    words = ["--engine", engine, "--shape", shape, *vllm]
                    yield Measurement(f"steps-{shape}-{engine}", limit_s, "vllm_steps", words)
        else:
            for engine in arguments.engines:
                words = ["--engine", engine, *answers, *(adapter if engine.startswith("mars") else ()), *vllm]
                yield Measurement(f"answers-{engine}", limit_s, "vllm_answers", words)


def step_table(lines: list[dict[str, Any]], gpu: str) -> Table:
    """Return the steps with random weights next to those that `mars-ray plan` models."""
    table = Table("shape", "engine", "callers", "positions", "ms", "range", "modelled", title="vLLM's steps")
    for line in lines:
        if "step_ms" in line:
            model = shape_model(line["shape"], gpu)
            modelled_ms = 1e3 * modelled_s(model, line["callers"], line["positions"])
            low, high = line["range_ms"]
            cells = [line["shape"], line["engine"], str(line["callers"]), str(line["positions"])]
            table.add_row(*cells, f"{line['step_ms']:.2f}", f"{low:.2f} to {high:.2f}", f"{modelled_ms:.2f}")
    return table


@cache
def shape_model(shape: str, gpu: str) -> StepModel:
    """Return the modelled step times of a shape."""
    config = Qwen2Config(**SHAPES[shape])
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return step_model(gpu, config, sum(parameter.numel() for parameter in network.parameters()))


def answer_table(lines: list[dict[str, Any]], model: StepModel) -> Table:
    """Return the speeds of answers next to those that follow from the modelled steps and the measured tokens a step.

    vLLM computes all positions of the plug-in, whatever a request's own setting; in `ar` it computes one.
    """
    columns = ("engine", "setting", "callers", "tokens/s", "range", "tokens/step", "modelled tokens/s")
    table = Table(*columns, title="Answers in vLLM")
    for line in lines:
        if "tokens_per_s" not in line:
            continue
        kind = EngineKind.of(line["engine"])
        tokens = line.get("tokens_per_step", 1.0)
        positions = line["callers"] * (kind.positions if "tokens_per_step" in line else 1)
        modelled = line["callers"] * tokens / modelled_s(model, line["callers"], positions)
        low, high = line["range"]
        cells = [kind.name, line["setting"], str(line["callers"]), f"{line['tokens_per_s']:,.0f}"]
        known = "" if kind.name == "ngram" else f"{modelled:,.0f}"
        table.add_row(*cells, f"{low:,.0f} to {high:,.0f}", f"{tokens:.2f}", known)
    return table


def equality(lines: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Count the answers that equal those of stock vLLM, that differ first at a tie, and that differ otherwise.

    A threshold below 1 may change answers, so only `ar` and exact decoding must be equal.
    """
    answered = [line for line in lines if "answers" in line]
    stock = [line for line in answered if line["engine"] == "stock" and line["setting"] == AR.name]
    counts: dict[str, dict[str, int]] = {}
    for line in answered if stock else ():
        if line["engine"] == "stock":
            continue
        count = counts[f"{line['engine']}: {line['setting']}"] = {"equal": 0, "tied": 0, "other": 0}
        for ours, theirs, gaps in zip(line["answers"], stock[-1]["answers"], stock[-1]["gaps"], strict=True):
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
            tied = same < len(gaps) and gaps[same] < TIE
            count["equal" if ours == theirs else "tied" if tied else "other"] += 1
    return counts


def modelled_s(model: StepModel, callers: int, positions: int) -> float:
    """Return the modelled seconds of a decoding step."""
    kv_tokens = callers * TOKENS_PER_SEQ
    return model.seconds(num_seqs=callers, positions=positions, kv_tokens=kv_tokens, prompt_tokens=0)


def main() -> None:
    """Run the parts and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="folder of a checkpoint with its card")
    parser.add_argument("--adapter", help="folder or name of an adapter of the model, for masks and to train on")
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all parts")
    parser.add_argument("--engines", type=lambda names: names.split(","), default=["stock", "mars-7", "mars-3"])
    parser.add_argument("--graphs", choices=tuple(GRAPHS), default="decode", help="how vLLM runs its network")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpu", help="entry of `gpus` in machines/figures.yaml; default: the device's")
    parser.add_argument("--data", type=Path, help="file of benchmarks.gpu.packed_file, to train an adapter on")
    parser.add_argument("--seconds", type=float, default=300, help="time to train the adapter")
    parser.add_argument("--small", action="store_true", help="a few prompts and steps, to try the program")
    parser.add_argument("--logs", type=Path, help="folder for the output of the measurements; default: beside --json")
    parser.add_argument("--json", type=Path, required=True, help="file of JSON lines to append to")
    arguments = parser.parse_args()
    for engine in arguments.engines:
        EngineKind.of(engine)
    arguments.gpu = arguments.gpu or (gpu_name() if arguments.device == "cuda" else "h100")
    folder = resolve_model(arguments.model)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    model = step_model(arguments.gpu, config, count_parameters(folder).total())
    logs = arguments.logs or arguments.json.parent / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    append(arguments.json, {"machine": machine(), "gpu": arguments.gpu, "model": arguments.model})
    import_vllm()
    for measurement in plan(arguments, folder):
        print(f"{measurement.name} ...", file=sys.stderr, flush=True)
        if reason := run(measurement, logs):
            append(arguments.json, {"name": measurement.name, "unavailable": reason[:300]})
    show(last_run(read_lines(arguments.json)), arguments.gpu, model)


def gpu_name() -> str:
    """Return the entry of the first GPU without using it, since a process that has used CUDA cannot be forked.

    Raises `ConfigError` if there is none.
    """
    try:
        names = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"no NVIDIA GPU was found ({error}). Try the program with --device cpu --small.") from error
    return gpu_of(names.splitlines()[0])


def show(lines: list[dict[str, Any]], gpu: str, model: StepModel) -> None:
    """Print the figures of all lines."""
    console = Console(width=120)
    for line in lines:
        if "unavailable" in line:
            console.print(f"{line['name']}: {line['unavailable']}", markup=False)
        elif "eager_ms" in line:
            graph = f", as a graph {line['graph_ms']:.2f} ms" if "graph_ms" in line else ""
            size = f"{line['shape']}, {line['rows']} rows, {line['positions']} positions each"
            console.print(f"torch runner: {size}: {line['eager_ms']:.2f} ms{graph}", markup=False)
        elif "copy_gb_per_s" in line:
            ceilings = f"copies {line['copy_gb_per_s']:,.0f} GB/s, bf16 products {line['bf16_tflops']:.0f} TFLOP/s"
            console.print(f"{line['gpu']}: {ceilings}", markup=False)
        elif "train" in line:
            figures = line["train"]
            speed = f"{figures['tokens_per_s']:,} tokens/s, MFU {figures['mfu']:.1%}"
            ahead = f"{figures['heldout_tokens_per_forward']:.2f} held-out tokens per forward"
            console.print(f"training, step {figures['steps']}: {speed}, {ahead}", markup=False)
        elif "equality" in line:
            console.print(f"torch runner, equal answers: {line['equality']}", markup=False)
    for table in (step_table(lines, gpu), answer_table(lines, model)):
        if table.row_count:
            console.print(table)
    for name, counts in equality(lines).items():
        console.print(f"{name}: {counts}", markup=False)


if __name__ == "__main__":
    run_program("benchmarks.gpu.run", main)
