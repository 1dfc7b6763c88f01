"""Compare the right answers that a .gguf file gives in llama.cpp and in our formats, which round its weights again.

    python -m benchmarks.file_accuracy model.gguf --data DIR --allow-code-execution \\
        --json benchmarks/results/DATE-file-accuracy.json

DIR holds `humaneval/HumanEval.jsonl.gz` and `gsm8k/test.jsonl.gz`. Every engine answers the same prompts greedily, one
token at a time. `p` is McNemar's exact test against the first engine of the table.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest
from transformers.utils import logging

from benchmarks.peers.llama_cpp import LlamaCpp, quantised_file
from benchmarks.peers.own_engine import BITS
from benchmarks.report import write_report
from mars_ray import LLM, SamplingParams
from mars_ray.data.chat import ChatEncoder
from mars_ray.evaluation.code_check import check_sandbox
from mars_ray.evaluation.metrics import mcnemar
from mars_ray.evaluation.scorer import is_right
from mars_ray.evaluation.task_files import BENCHMARK_TOKENS
from mars_ray.evaluation.tasks import Question, TaskOptions, open_tasks
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.usable_cpus import usable_cpus

TASKS = ("humaneval", "gsm8k")
LLAMA_CPP = {"llama.cpp, the file": True, "llama.cpp Q8_0": False}
"""Names of llama.cpp's engines, and whether each reads the file as it is."""
OURS = {f"mars-ray {quantize or 'bfloat16'}": quantize for quantize in BITS}
ENGINES = (*LLAMA_CPP, *OURS)
ROWS = 16
"""Prompts that llama.cpp answers together."""


def main() -> None:
    """Answer the tasks with each engine, print the table after each, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a .gguf file")
    parser.add_argument("--data", type=Path, required=True, help="folder of the benchmarks")
    parser.add_argument("--task", action="append", choices=TASKS, help="repeatable; all without it")
    parser.add_argument("--engine", action="append", choices=ENGINES, help="repeatable; all without it")
    parser.add_argument("--examples", type=int, default=300, help="most questions of each task")
    parser.add_argument("--allow-code-execution", action="store_true", help="run HumanEval's tests in the sandbox")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    options = TaskOptions(
        examples=arguments.examples, seeds=1, data=arguments.data, allow_code_execution=arguments.allow_code_execution
    )
    tasks = {name: open_tasks([name], options)[0].questions for name in arguments.task or TASKS}
    if "humaneval" in tasks:
        check_sandbox()
    results: dict[str, dict[str, list[bool]]] = {}
    questions = [question for task in tasks.values() for question in task]
    for engine in arguments.engine or ENGINES:
        results[engine] = {name: [] for name in tasks}
        for question, text in zip(questions, answers(engine, arguments.file, questions), strict=True):
            results[engine][question.task].append(is_right(question, text))
        show(results)
        write_report(arguments.json, {"right": results})


def answers(engine: str, file: Path, questions: Sequence[Question]) -> list[str]:
    """Load the model into an engine, and return the engine's answers."""
    folder = resolve_model(str(file))
    if engine in OURS:
        return answers_of_ours(folder, OURS[engine], questions)
    return answers_of_llama_cpp(folder, file if LLAMA_CPP[engine] else None, questions)


def answers_of_ours(folder: Path, quantize: Any, questions: Sequence[Question]) -> list[str]:
    """Return the answers of our engine."""
    with LLM(folder, dtype="bfloat16", quantize=quantize) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=BENCHMARK_TOKENS)
        return [output.text for output in llm.chat([q.messages for q in questions], sampling, mode="ar")]


def answers_of_llama_cpp(folder: Path, file: Path | None, questions: Sequence[Question]) -> list[str]:
    """Return the answers of llama.cpp, with the file or with a file in 8 bits."""
    checkpoint = load_checkpoint(folder)
    kind = "file" if file else "Q8_0"
    peer = LlamaCpp(file or quantised_file(folder, kind), kind, usable_cpus(), checkpoint.mask_id, checkpoint.stop_ids)
    encoder = ChatEncoder(checkpoint.tokenizer)
    texts = []
    try:
        for start in range(0, len(questions), ROWS):
            prompts = [encoder.prompt(question.messages) for question in questions[start : start + ROWS]]
            answers = peer.answer(prompts, BENCHMARK_TOKENS).tokens
            texts += [checkpoint.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in answers]
    finally:
        peer.close()
    return texts


def show(results: dict[str, dict[str, list[bool]]]) -> None:
    """Print right answers with intervals of 95 % (Wilson), and how they differ from the first engine's."""
    first = next(iter(results.values()))
    table = Table("engine", *(title for name in first for title in (name, "p")))
    for engine, tasks in results.items():
        cells = []
        for name, right in tasks.items():
            low, high = binomtest(sum(right), len(right)).proportion_ci(method="wilson")
            better = sum(ours and not theirs for ours, theirs in zip(right, first[name], strict=True))
            worse = sum(theirs and not ours for ours, theirs in zip(right, first[name], strict=True))
            cells += [
                f"{sum(right)}/{len(right)} ({100 * low:.0f}..{100 * high:.0f} %)",
                f"{mcnemar(better, worse):.2f}",
            ]
        table.add_row(engine, *cells)
    Console().print(table)


if __name__ == "__main__":
    run_program("benchmarks.file_accuracy", main)
