"""Time the decoding steps of one vLLM engine by callers, with random weights of the shape of a known network.

With random weights no mask passes a threshold, so every request gets one token a step: the ratio of the times of two
engines is the price of the plug-in's 1 + 2 K positions. A time is the difference of a long and a short run.
"""

import argparse
import shutil
import time
from pathlib import Path
from statistics import median
from tempfile import gettempdir

from benchmarks.gpu.lines import append
from benchmarks.gpu.settings import SHAPES
from benchmarks.gpu.vllm_options import GRAPHS, EngineKind, engine_options
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program

PROMPT_TOKENS = 128
SHORT, LONG = 8, 72
"""Tokens of the two runs."""
ROUNDS = 3


def shape_folder(shape: str) -> Path:
    """Return a folder with the configuration of a shape, and the card of the bundled model for its mask token."""
    from transformers import Qwen2Config

    folder = Path(gettempdir()) / "shapes" / shape
    folder.mkdir(parents=True, exist_ok=True)
    Qwen2Config(
        **SHAPES[shape], max_position_embeddings=4096, architectures=["Qwen2ForCausalLM"], dtype="bfloat16"
    ).save_pretrained(folder)
    shutil.copy(resolve_model("bundled") / "mars.json", folder)
    return folder


def measure(arguments: argparse.Namespace) -> None:
    """Start the engine and append its figures."""
    kind = EngineKind.of(arguments.engine)
    callers = [int(count) for count in arguments.callers.split(",")]
    options = engine_options(
        kind,
        shape_folder(arguments.shape),
        device=arguments.device,
        graphs=arguments.graphs,
        max_num_seqs=max(callers),
    )
    from vllm import LLM, SamplingParams  # reads variables that the options set

    started_s = time.perf_counter()
    llm = LLM(**options, skip_tokenizer_init=True, load_format="dummy")
    same = {"engine": kind.name, "shape": arguments.shape, "graphs": arguments.graphs}
    append(arguments.json, {**same, "start_s": time.perf_counter() - started_s})

    def seconds(count: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [(7 * caller + place) % 400 + 50 for place in range(PROMPT_TOKENS)]}
            for caller in range(count)
        ]
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        begun_s = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begun_s

    for count in callers:
        seconds(count, SHORT)
        rounds = [(seconds(count, SHORT), seconds(count, LONG)) for _ in range(ROUNDS)]
        steps_ms = sorted(1e3 * (long_s - short_s) / (LONG - SHORT) for short_s, long_s in rounds)
        short_s = median(short_s for short_s, _ in rounds)
        line = {"callers": count, "positions": count * kind.positions, "step_ms": steps_ms[len(steps_ms) // 2]}
        append(arguments.json, {**same, **line, "range_ms": [steps_ms[0], steps_ms[-1]], "prefill_and_8_s": short_s})


def main() -> None:
    """Measure one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", required=True, help="stock, or mars-K with K masks")
    parser.add_argument("--shape", choices=tuple(SHAPES), required=True)
    parser.add_argument("--graphs", choices=tuple(GRAPHS), default="decode")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--callers", default="1,8,32,128")
    parser.add_argument("--json", type=Path, required=True, help="file of JSON lines to append to")
    measure(parser.parse_args())


if __name__ == "__main__":
    run_program("benchmarks.gpu.vllm_steps", main)
