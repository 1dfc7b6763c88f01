"""Decode the answers of a trained model with one vLLM engine: which answers, and how fast by callers.

The answers are greedy, all prompts at once. Speed is the tokens per second of one batch with as many requests as
callers. Answers end where the model ends them, because text after that has other confidences; the last answers of a
batch therefore run with fewer neighbours.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.gpu.lines import append
from benchmarks.gpu.prompts import PROMPTS, prompts_of
from benchmarks.gpu.settings import AR, Setting, lookahead_settings
from benchmarks.gpu.vllm_options import GRAPHS, EngineKind, engine_options
from mars_ray.program import run_program

LEAST = 8
"""Prompts behind each figure, at least; fewer callers answer them in turns."""


def measure(arguments: argparse.Namespace) -> None:
    """Start the engine and append its answers and speeds."""
    kind = EngineKind.of(arguments.engine)
    callers = [int(count) for count in arguments.callers.split(",")]
    options = engine_options(
        kind,
        arguments.folder,
        device=arguments.device,
        graphs=arguments.graphs,
        max_num_seqs=max(callers),
        adapter=arguments.adapter,
    )
    from vllm import LLM, SamplingParams  # reads variables that the options set

    started_s = time.perf_counter()
    llm = LLM(**options)
    same = {"engine": kind.name, "graphs": arguments.graphs}
    append(arguments.json, {**same, "start_s": time.perf_counter() - started_s})

    tokenizer = AutoTokenizer.from_pretrained(arguments.folder, local_files_only=True, trust_remote_code=False)
    sizes = {max(count, LEAST) for count in callers} | set(callers) | {arguments.answers}
    prompts_by_size = {size: prompts_of(tokenizer, size, arguments.prompts) for size in sizes}

    def answer(setting: Setting, count: int, least: int = 0, **sampling: Any) -> list[Any]:
        """Answer `count` prompts at once, and so on until `least` are answered."""
        extra = setting.parameters if kind.masks else {}
        params = SamplingParams(temperature=0.0, max_tokens=arguments.tokens, extra_args=extra, **sampling)
        prompts = [{"prompt_token_ids": list(ids)} for ids in prompts_by_size[max(count, least)]]
        batches = [prompts[start : start + count] for start in range(0, len(prompts), count)]
        return [output for batch in batches for output in llm.generate(batch, params, use_tqdm=False)]

    def record() -> dict[str, Any]:
        return llm.collective_rpc("mars_record")[0] if kind.masks else {}

    for setting in [AR, *lookahead_settings(kind.masks)] if kind.masks else [AR]:
        outputs = answer(setting, arguments.answers, logprobs=None if kind.masks else 2)  # also warms the engine up
        line = {**same, "setting": setting.name, "answers": [list(output.outputs[0].token_ids) for output in outputs]}
        if kind.name == "stock":
            line["gaps"] = [gaps_of(output.outputs[0].logprobs) for output in outputs]
        append(arguments.json, line)
        for count in callers:
            answer(setting, count)  # warms up
            rounds = []
            for _ in range(arguments.rounds):
                before, begun_s = record(), time.perf_counter()
                outputs = answer(setting, count, LEAST)
                seconds = time.perf_counter() - begun_s
                tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                rounds.append((tokens / seconds, lookahead_between(before, record())))
            rounds.sort(key=lambda pair: pair[0])
            speeds = [speed for speed, _ in rounds]
            speed, lookahead = rounds[len(rounds) // 2]
            line = {**same, "setting": setting.name, "callers": count, "tokens_per_s": speed}
            append(arguments.json, {**line, "range": [speeds[0], speeds[-1]], **lookahead})
    if kind.masks:
        append(arguments.json, {**same, "step_times": record()["step_times"]})


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
    parser.add_argument("--engine", required=True, help="stock, ngram, or mars-K with K masks")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--adapter", help="folder or name of the adapter of mars-K")
    parser.add_argument("--graphs", choices=tuple(GRAPHS), default="decode")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--callers", default="1,8,32,128")
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--answers", type=int, default=24, help="prompts whose answers are compared")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, required=True, help="file of JSON lines to append to")
    measure(parser.parse_args())


if __name__ == "__main__":
    run_program("benchmarks.gpu.vllm_answers", main)
