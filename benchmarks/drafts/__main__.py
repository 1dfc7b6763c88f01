"""Compare drafts from text with one token at a time, and with exact mode without them.

    python -m benchmarks.drafts --model smollm2 --quantize int8 --callers 1 --json drafts.json

All three run in turns in one engine with an empty cache, so a time includes the prompt. Answers are compared, too.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from benchmarks.drafts.workloads import Workload, workloads
from benchmarks.report import write_report
from mars_ray import LLM, SamplingParams
from mars_ray.engine.sampling.draft_choice import DraftChoice
from mars_ray.errors import RequestError
from mars_ray.measure import Sample, deviation, interleaved
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine

CANDIDATES = ("ar", "exact without text", "exact")


def runner(llm: LLM, work: Workload, name: str, answers: dict[str, list[tuple[int, ...]]]) -> Callable[[], Sample]:
    """Return a function that answers all conversations of a task in one mode."""

    def run() -> Sample:
        llm.engine.clear_cache()  # type: ignore[attr-defined]  # the engine of this package has it
        without = patch.object(DraftChoice, "choose", lambda *_: None)
        with without if name == "exact without text" else nullcontext():
            start_s = perf_counter()
            outputs = llm.chat(
                work.conversations,
                SamplingParams(max_tokens=work.max_tokens),
                mode=name.split()[0],
                schema=work.schema,
                tools=work.tools,
                progress=False,
            )
            seconds = perf_counter() - start_s
        answers[name] = [tuple(output.outputs[0].token_ids) for output in outputs]
        tokens = sum(map(len, answers[name]))
        forwards = sum(round(len(answer.outputs[0].token_ids) / answer.tokens_per_forward) for answer in outputs)
        return Sample(tokens=tokens, seconds=seconds, forwards=forwards)

    return run


def measure(llm: LLM, work: Workload, callers: int, rounds: int) -> dict[str, Any]:
    """Return the figures of one task at one number of callers."""
    answers: dict[str, list[tuple[int, ...]]] = {}
    candidates = {name: runner(llm, work, name, answers) for name in CANDIDATES}
    with ProgressLine(f"{work.name}, {callers} callers", total=len(candidates) * (rounds + 1)) as progress:
        samples = interleaved(candidates, rounds, progress)
    figures: dict[str, Any] = {"task": work.name, "callers": callers, "conversations": len(work.conversations)}
    for name in CANDIDATES:
        runs = samples[name]
        times = [run.tokens_per_s / ar.tokens_per_s for run, ar in zip(runs, samples["ar"], strict=True)]
        figures[name] = {
            "tokens_per_s": mean(run.tokens_per_s for run in runs),
            "tokens_per_forward": sum(run.tokens for run in runs) / sum(run.forwards for run in runs),
            "times_ar": mean(times),
            "times_ar_std": deviation(times),
            "same_answers": sum(map(tuple.__eq__, answers[name], answers["ar"])),
        }
    return figures


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description="Compare drafts from text with one token at a time.")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--callers", type=int, action="append")
    parser.add_argument("--task", action="append", help="a task by its name; may be repeated")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = Table(
        title=f"{arguments.model}, {arguments.quantize or 'no'} quantization, {arguments.rounds} rounds in turns"
    )
    for column in ("task", "callers", "ar, tokens/s", "without text", "exact", "tokens per forward", "same"):
        table.add_column(column, justify="left" if column == "task" else "right")
    runs = []
    for callers in arguments.callers or [1, 4, 16]:
        llm = LLM(arguments.model, max_num_seqs=callers, quantize=arguments.quantize)
        for work in workloads(max(arguments.conversations, callers)):
            if arguments.task and work.name not in arguments.task:
                continue
            try:
                runs.append(figures := measure(llm, work, callers, arguments.rounds))
            except RequestError as error:  # a model whose chat template knows no tools
                print(f"{work.name}: {error}", flush=True)
                continue
            without, exact = figures["exact without text"], figures["exact"]
            print(json.dumps(figures), flush=True)  # what is measured stays if the run is cut short
            table.add_row(
                work.name,
                str(callers),
                f"{figures['ar']['tokens_per_s']:,.0f}",
                f"{without['times_ar']:.2f} ± {without['times_ar_std']:.2f}",
                f"{exact['times_ar']:.2f} ± {exact['times_ar_std']:.2f}",
                f"{exact['tokens_per_forward']:.2f}",
                f"{exact['same_answers']} of {figures['conversations']}",
            )
    Console(width=140).print(table)
    options = {name: value for name, value in vars(arguments).items() if name != "json"}
    write_report(arguments.json, {**options, "runs": runs})


if __name__ == "__main__":
    run_program("benchmarks.drafts", main)
