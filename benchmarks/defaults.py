"""Compare `generate` and `serve` with default options to the engine in one process, on the same questions.

    python -m benchmarks.defaults --model smollm2 --rounds 3 --json benchmarks/results/DATE-defaults.json

`generate` is compared with `LLM.chat` over all questions at once. Its tokens per second count from the moment when the
first worker is ready. The other seconds, to start Ray and the model and to end, are shown separately. The endpoint has
eight callers, each of which sends its next question as soon as it has an answer, and is compared with an `LLM` that
decodes eight at a time. Contenders take turns, each in its own processes. Rounds are added to an existing file of
results with the same options, machine and commit. `others` is the share of the processor that other programs used in
the second before.
"""

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import openai
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.report import report_so_far
from mars_ray.cli.shared import write_json
from mars_ray.data.record_file import read_records
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.serve.deploy.environment import free_ports

CALLERS = 8
CONTENDERS = ("LLM.chat", "generate", "LLM.chat, 8 at a time", "serve, 8 callers")
OF = {"generate": "LLM.chat", "serve, 8 callers": "LLM.chat, 8 at a time"}
"""The baseline of each contender."""


def main() -> None:
    """Compare, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--questions", type=Path, default=Path("../shared/data/gsm8k/test.jsonl.gz"))
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(llm_chat(arguments.model, arguments.questions, arguments.tokens, arguments.one)))
        return
    command = f"python -m benchmarks.defaults --model {arguments.model} --questions {arguments.questions.name}"
    command += f" --rows {arguments.rows} --tokens {arguments.tokens}"
    report = report_so_far(arguments.json, {"command": command})
    rounds: list[dict[str, Any]] = report.setdefault("rounds", [])
    resolve_model(arguments.model)  # so that a wrong name ends the program here
    with TemporaryDirectory() as folder:
        source = Path(folder) / "rows.jsonl"
        _write_rows(arguments.questions, arguments.rows, source)
        for _ in range(arguments.rounds):
            rounds.append({name: _measured(name, arguments.model, source, arguments.tokens) for name in CONTENDERS})
    show(arguments.model, rounds)
    write_json(arguments.json, report)


def show(model: str, rounds: Sequence[dict[str, Any]]) -> None:
    """Print medians over the rounds, and the median of the ratios within each round."""
    table = Table(title=f"{model}, {len(rounds)} rounds")
    for column in ("", "tokens/s", "times the engine", "seconds around", "others"):
        table.add_column(column, justify="right")
    for name in CONTENDERS:
        samples = [contenders[name] for contenders in rounds]
        ratio = ""
        if name in OF:
            ratios = [contenders[name]["tokens_per_s"] / contenders[OF[name]]["tokens_per_s"] for contenders in rounds]
            ratio = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        around = [sample["seconds_around"] for sample in samples]
        table.add_row(
            name,
            f"{median(sample['tokens_per_s'] for sample in samples):,.0f}",
            ratio,
            f"{median(around):.1f} ({min(around):.1f} to {max(around):.1f})",
            f"{max(sample['others'] for sample in samples):.0%}",
        )
    Console().print(table)


def llm_chat(model: str, source: Path, tokens: int, name: str) -> dict[str, float]:
    """Answer all rows with `LLM.chat` in this process."""
    from mars_ray import LLM, SamplingParams

    began_s = time.monotonic()
    seqs = CALLERS if name.endswith("at a time") else None
    with LLM(model, max_num_seqs=seqs, max_waiting_seqs=1 << 16) as llm:
        ready_s = time.monotonic()
        answers = llm.chat(_prompts(source), SamplingParams(max_tokens=tokens))
        ended_s = time.monotonic()
    made_tokens = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
    return {"tokens_per_s": made_tokens / (ended_s - ready_s), "seconds_around": ready_s - began_s}


def generate(model: str, source: Path, tokens: int) -> dict[str, float]:
    """Run the command with its defaults."""
    with TemporaryDirectory() as folder:
        words = ["--model", model, "--input", str(source), "--output", f"{folder}/out", "--max-tokens", str(tokens)]
        began_s = time.monotonic()
        subprocess.run([*_mars_ray("generate"), *words], check=True, stdout=subprocess.DEVNULL)
        seconds = time.monotonic() - began_s
        report = json.loads((Path(folder) / "out" / "report.json").read_text())
    return {"tokens_per_s": report["tokens"] / report["seconds"], "seconds_around": seconds - report["seconds"]}


def serve(model: str, source: Path, tokens: int) -> dict[str, float]:
    """Start the endpoint with its defaults and send it the questions."""
    began_s = time.monotonic()
    port = next(free_ports())
    process = subprocess.Popen([*_mars_ray("serve"), "--model", model, "--port", str(port)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().decode()
        assert re.match("ready in", ready), "the endpoint did not start"
        ready_s = time.monotonic()
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:

            def ask(prompt: str) -> int:
                answer = client.chat.completions.create(
                    model=model,
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=tokens,
                    temperature=0,
                )
                assert answer.usage is not None
                return answer.usage.completion_tokens

            ask("Hello")
            asked_s = time.monotonic()
            with ThreadPoolExecutor(CALLERS) as callers:
                made_tokens = sum(callers.map(ask, _prompts(source)))
            seconds = time.monotonic() - asked_s
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
    return {"tokens_per_s": made_tokens / seconds, "seconds_around": ready_s - began_s}


def _measured(name: str, model: str, source: Path, tokens: int) -> dict[str, float]:
    others_share = psutil.cpu_percent(1.0) / 100
    if name == "generate":
        figures = generate(model, source, tokens)
    elif name.startswith("serve"):
        figures = serve(model, source, tokens)
    else:
        words = ["--one", name, "--model", model, "--questions", str(source), "--tokens", str(tokens)]
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.defaults", *words], stdout=subprocess.PIPE, check=True, text=True
        )
        figures = json.loads(process.stdout.splitlines()[-1])
    print(name, figures, file=sys.stderr, flush=True)
    return figures | {"others": others_share}


def _mars_ray(command: str) -> list[str]:
    return [sys.executable, "-m", "mars_ray", command]


def _write_rows(questions: Path, count: int, source: Path) -> None:
    raws = [raw for chunk in read_records(questions, count) for raw in chunk][:count]
    rows = [{"id": str(number), "prompt": json.loads(raw)["question"]} for number, raw in enumerate(raws)]
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def _prompts(source: Path) -> list[str]:
    return [json.loads(line)["prompt"] for line in source.read_text().splitlines()]


if __name__ == "__main__":
    run_program("benchmarks.defaults", main)
