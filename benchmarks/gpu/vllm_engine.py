"""Run one vLLM engine through its measurements and print them as JSON. `vllm_part` starts one process per engine.

The equality answers are greedy, all prompts at once. Speed is the tokens per second of one batch with as many requests
as callers. Answers end where the model ends them, because text after that has other confidences; the last answers of a
batch therefore run with fewer neighbours.
"""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.settings import AR, Setting, lookahead_settings
from mars_ray.data.prompt_file import prompt_of

PROMPTS = Path(__file__).parents[2] / "mars_ray/assets/prompts.jsonl"
MAX_MODEL_LEN = 512
NGRAM = {"method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_max": 4}
GRAPHS: dict[str, dict[str, Any]] = {
    "full": {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}},
    "piecewise": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
    "off": {"enforce_eager": True},
}


def engine_options(arguments: argparse.Namespace, max_num_seqs: int) -> dict[str, Any]:
    """Return the options of vLLM's `LLM`."""
    options: dict[str, Any] = {
        "model": str(arguments.folder),
        "dtype": "bfloat16",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(2048, 16 * max_num_seqs),
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if arguments.kind == "ngram":
        options["speculative_config"] = NGRAM
    if arguments.kind == "mars":
        from transformers import AutoConfig

        architecture = AutoConfig.from_pretrained(
            arguments.folder, local_files_only=True, trust_remote_code=False
        ).architectures[0]
        options["hf_overrides"] = {"architectures": [f"Mars{architecture}"]}
        options["additional_config"] = {"mars": {"block": arguments.masks + 1}}
    if arguments.device == "cuda":
        return options | GRAPHS[arguments.graphs]
    return options | {"dtype": "float32", "enforce_eager": True}


def chats(count: int) -> list[list[dict[str, Any]]]:
    """Return `count` bundled prompts spread over the families, as conversations; they repeat if there are fewer."""
    conversations = [list(prompt_of(json.loads(line))) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    every = max(1, len(conversations) // count)
    return (conversations[::every] * count)[:count]


def measure(arguments: argparse.Namespace, callers: list[int]) -> dict[str, Any]:
    """Start the engine and return its answers and speeds."""
    if arguments.device == "cpu":  # for trying the program: vLLM's CPU build under Triton's interpreter
        from tests.vllm.interpreted import LLM, SamplingParams
    else:
        from vllm import LLM, SamplingParams
    started_s = time.perf_counter()
    llm = LLM(**engine_options(arguments, max(callers)))
    mars = arguments.kind == "mars"
    report: dict[str, Any] = {"start_s": time.perf_counter() - started_s, "answers": {}, "speed": []}
    report["masks"] = arguments.masks if mars else 0

    def answer(setting: Setting, count: int, **sampling: Any) -> Any:
        extra = setting.parameters if mars else {}
        params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, extra_args=extra, **sampling)
        return llm.chat(chats(count), params, use_tqdm=False)

    def record() -> dict[str, Any]:
        return llm.collective_rpc("mars_record")[0] if mars else {}

    for setting in [AR, *lookahead_settings(arguments.masks)] if mars else [AR]:
        outputs = answer(setting, arguments.prompts, logprobs=None if mars else 2)  # also warms the engine up
        report["answers"][setting.name] = [list(output.outputs[0].token_ids) for output in outputs]
        if arguments.kind == "stock":
            report["gaps"] = [gaps_of(output.outputs[0].logprobs) for output in outputs]
        for count in callers:
            before, started_s = record(), time.perf_counter()
            outputs = answer(setting, count)
            seconds = time.perf_counter() - started_s
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
            row = {"setting": setting.name, "callers": count, "tokens_per_s": tokens / seconds, "seconds": seconds}
            report["speed"].append(row | lookahead_between(before, record()))
    report["step_times"] = record().get("step_times")
    return report


def gaps_of(logprobs: Any) -> list[float]:
    """Return, at each token, the difference of the two highest log-probabilities."""
    tops = [sorted((entry.logprob for entry in position.values()), reverse=True) for position in logprobs]
    return [top[0] - top[1] for top in tops]


def lookahead_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Return the tokens per step that two records of the plug-in show; empty without the plug-in."""
    if not before:
        return {}
    gained = {name: after["lookahead"][name] - before["lookahead"][name] for name in ("forwards", "tokens")}
    return {"tokens_per_step": gained["tokens"] / gained["forwards"]} if gained["forwards"] else {}


def main() -> None:
    """Measure one engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kind", choices=("stock", "ngram", "mars"), required=True)
    parser.add_argument("--masks", type=int, default=7)
    parser.add_argument("--graphs", choices=tuple(GRAPHS), default="full")
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument("--callers", required=True, help="such as 1,8,32")
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    arguments = parser.parse_args()
    if arguments.kind == "mars":
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    print(json.dumps(measure(arguments, [int(count) for count in arguments.callers.split(",")])))


if __name__ == "__main__":
    main()
