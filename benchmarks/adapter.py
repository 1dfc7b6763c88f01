"""Measure an adapter on one workload at each setting: agreement, accuracy, and speed relative to its base.

    python -m benchmarks.adapter general --model smollm2 --adapter runs/smollm2/model --json adapter.json
    python -m benchmarks.adapter reasoning --model smollm2 --adapter runs/smollm2/model --json adapter.json
    python -m benchmarks.adapter code --model coder.gguf --adapter runs/coder/model --quantize int8 \\
        --allow-code-execution --json adapter.json
    python -m benchmarks.adapter structure --model runs/structure/base/model --adapter runs/structure/model \\
        --tasks data/structure/heldout.jsonl --json adapter.json

`general` uses the held-out prompts of the instruction data, `reasoning` GSM8K, `code` HumanEval, `structure` a file
made by `pipelines/structure_tasks.py`. Quality is measured on many prompts in batches, with the block of the adapter.
With `--quantize`, agreement is not measured, because torch has no rounded weights to judge it. Speed is measured one
request at a time, in rounds with different prompts. In a round every setting answers the same prompts in turn.
llama.cpp, if installed, answers them too, with as many bits and tokens. Speed leaves out the time to the first token.
With `--callers 16` the settings take turns at 16 requests at once, and nothing else is measured. Each call adds to the
file, and to a table next to it. All calls need the same machine, commit, threads and quantization.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest
from transformers.utils import logging

from benchmarks.adapter_report import markdown
from benchmarks.peers.llama_cpp import LlamaCpp, format_of, llama_cpp_peers
from benchmarks.peers.own_engine import BITS
from benchmarks.peers.peer import PeerUnavailableError
from benchmarks.report import refuse_others, report_so_far
from mars_ray.adapter.card import read_adapter_card, resolve_adapter, unnamed
from mars_ray.adapter.folder import load_adapter
from mars_ray.cli.shared import write_json
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.dropped_records import MAX_DROPPED
from mars_ray.data.records import Message
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import OfflineResult, decode_all, run_steps
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import ConfigError
from mars_ray.evaluation.agreement import agreed_tokens
from mars_ray.evaluation.code_check import check_sandbox
from mars_ray.evaluation.metrics import mcnemar
from mars_ray.evaluation.scorer import is_right
from mars_ray.evaluation.settings import ADAPTER_THRESHOLDS, AR, EXACT, DecodingSetting, settings_of
from mars_ray.evaluation.tasks import TaskOptions, open_tasks
from mars_ray.measure import Sample, interleaved, speedup, throughput
from mars_ray.model.checkpoint import Checkpoint, load_model
from mars_ray.model.folder import open_model
from mars_ray.model.resolve import model_label
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine
from pipelines.questions import questions

SETTINGS = settings_of((Mode.EXACT, Mode.THRESHOLD), ADAPTER_THRESHOLDS)
TEXT_ONLY = "exact without the adapter"
"""Drafts from text alone, which any model has."""
ROUND_PROMPTS = 10
WARM_UP_PROMPTS = 3
SPEED_TOKENS = 48
ANSWERS_OF_A_CALLER = 3
RECORDS_PER_QUESTION = 2
"""Records that are read for each question, because some prompts are too long."""
BATCH = 16
PROMPT_TOKENS_MAX = 384
MAX_TOKENS = {"general": 128, "reasoning": 192, "code": 256, "structure": 192}
BENCHMARK_OF = {"reasoning": "gsm8k", "code": "humaneval"}

Json = dict[str, Any]
Judge = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as tokens, with the judge of its answer if the workload has one."""

    prompt: tuple[int, ...]
    judge: Judge | None


def main() -> None:
    """Measure one workload, and update the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=MAX_TOKENS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapter", required=True, help="name or folder")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with instruct/, gsm8k/ …")
    parser.add_argument("--allow-code-execution", action="store_true", help="run HumanEval's tests in the sandbox")
    parser.add_argument("--tasks", type=Path, help="prompts with references, for structure")
    parser.add_argument("--prompts", type=int, default=100, help="number of prompts")
    parser.add_argument("--rounds", type=int, default=6, help=f"rounds of {ROUND_PROMPTS} prompts; 0 skips speed")
    parser.add_argument("--callers", type=int, action="append", help="measure this many callers instead; repeatable")
    parser.add_argument(
        "--threshold",
        type=float,
        action="append",
        choices=ADAPTER_THRESHOLDS,
        help="for speed; repeatable, all without it",
    )
    parser.add_argument("--speed-tokens", type=int, default=SPEED_TOKENS, help="most tokens of an answer for speed")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    model = open_model(arguments.model)
    folder = model.folder
    numbers = arguments.quantize or model.dtype.name
    report = report_so_far(arguments.json, {"dtype": numbers, "threads": arguments.threads})
    workload = report.setdefault("workloads", {}).setdefault(arguments.workload, {})
    adapter = resolve_adapter(arguments.adapter)
    assert adapter is not None
    names = describe(arguments.model, folder, adapter)
    if workload:
        refuse_others(arguments.json, workload, names)
    workload |= names
    checkpoint = load_model(model)
    questions = read_questions(
        arguments.workload,
        max(arguments.prompts, (arguments.rounds + 1) * ROUND_PROMPTS),
        ChatEncoder(checkpoint.tokenizer),
        arguments.data,
        arguments.tasks,
        allow_code_execution=arguments.allow_code_execution,
    )
    if arguments.rounds and not arguments.callers and len(questions) <= ROUND_PROMPTS:
        raise ConfigError(
            f"{arguments.workload} has {len(questions)} questions with a short prompt; speed needs more than "
            f"{ROUND_PROMPTS}, because the first {ROUND_PROMPTS} warm up. Give --rounds 0."
        )
    if arguments.callers:
        workload["callers"] = [
            concurrent_speed(checkpoint, folder, adapter, arguments, questions, callers)
            for callers in arguments.callers
        ]
    if arguments.prompts and not arguments.callers:
        workload["quality"] = quality(checkpoint, folder, adapter, arguments, questions)
    if arguments.rounds and not arguments.callers:
        workload["speed"] = speed(checkpoint, folder, adapter, arguments, questions)
    write_json(arguments.json, report)
    arguments.json.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))


def describe(model: str, folder: Path, adapter: Path) -> Json:
    """Return the names of model and adapter, and how the adapter was trained."""
    card = read_adapter_card(adapter)
    trained = {"steps": card.steps, "tokens": card.tokens, "block": card.block, "data": card.data}
    return {"model": model_label(model, folder), "adapter": trained}


def read_questions(
    workload: str,
    count: int,
    encoder: ChatEncoder,
    data: Path,
    tasks: Path | None = None,
    *,
    allow_code_execution: bool = False,
) -> list[Question]:
    """Return the first `count` questions of a workload that have a short prompt."""
    if workload == "general":
        first = questions(data / "instruct" / "val.jsonl.gz", RECORDS_PER_QUESTION * count, MAX_DROPPED)
        pairs: list[tuple[Sequence[Message], Judge | None]] = [(messages, None) for messages in first]
    else:
        if workload == "structure" and tasks is None:
            raise ConfigError("structure needs a file of tasks; name it with --tasks.")
        name = BENCHMARK_OF.get(workload) or str(tasks)
        folder = data if workload in BENCHMARK_OF else None
        options = TaskOptions(seeds=1, data=folder, allow_code_execution=allow_code_execution)
        [task] = open_tasks((name,), options)
        if workload == "code":
            check_sandbox()
        pairs = [(question.messages, partial(is_right, question)) for question in task.questions]
    candidates = (Question(tuple(encoder.prompt(messages)), judge) for messages, judge in pairs)
    return list(islice((question for question in candidates if len(question.prompt) <= PROMPT_TOKENS_MAX), count))


def quality(
    checkpoint: Checkpoint, folder: Path, adapter: Path, arguments: argparse.Namespace, questions: list[Question]
) -> Json:
    """Return agreement with the base and accuracy of the answers at each setting."""
    tokens = MAX_TOKENS[arguments.workload]
    weights = load_adapter(adapter, folder)
    options = EngineOptions(max_num_seqs=BATCH, quantize=arguments.quantize)
    engine = Engine(checkpoint, options, adapters=unnamed(weights))
    answers: dict[str, list[OfflineResult]] = {}
    with ProgressLine("answers", total=len(SETTINGS)) as progress:
        for number, setting in enumerate(SETTINGS):
            decode = DecodeParams(mode=setting.mode, threshold=setting.threshold, block=engine.block)
            answers[setting.name] = answer_questions(engine, questions, decode, tokens)
            progress.update(number + 1, {})
    agreed: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    if not arguments.quantize:
        different = sorted(
            {(result.request.prompt, tuple(result.tokens)) for results in answers.values() for result in results}
        )
        with ProgressLine("compare with the base", total=len(different)) as progress:
            counts = agreed_tokens(checkpoint.network, different, checkpoint.mask_id, progress)
        agreed = dict(zip(different, counts, strict=True))
    right = {
        name: np.array(
            [bool(q.judge and q.judge(result.text)) for q, result in zip(questions, results, strict=True)], np.int8
        )
        for name, results in answers.items()
    }
    figures: Json = {}
    for name, results in answers.items():
        total = sum(len(result.tokens) for result in results)
        figures[name] = {
            "tokens": total,
            "tokens_per_forward": total / sum(result.forwards for result in results),
            "same_answers": sum(
                result.tokens == ar.tokens for result, ar in zip(results, answers[AR.name], strict=True)
            ),
        }
        if agreed:
            right_tokens = sum(agreed[result.request.prompt, tuple(result.tokens)] for result in results)
            figures[name]["agreement"] = right_tokens / total
        if questions[0].judge:
            change = right[name] - right[AR.name]
            count = int(right[name].sum())
            figures[name] |= {
                "right": count,
                "interval": list(binomtest(count, len(questions)).proportion_ci(method="wilson")),
                "better": int((change > 0).sum()),
                "worse": int((change < 0).sum()),
                "p_value": mcnemar(int((change > 0).sum()), int((change < 0).sum())),
            }
    return {"prompts": len(questions), "max_tokens": tokens, "settings": figures}


def answer_questions(
    engine: Engine, questions: list[Question], decode: DecodeParams, tokens: int
) -> list[OfflineResult]:
    """Return the answers in the order of the questions."""
    sampling = SamplingParams(max_tokens=tokens)
    requests = (
        Request(id=str(number), prompt=question.prompt, sampling=sampling, decode=decode)
        for number, question in enumerate(questions)
    )
    return sorted(decode_all(engine, requests), key=lambda result: int(result.request.id))


def speed_settings(arguments: argparse.Namespace) -> tuple[DecodingSetting, ...]:
    """Return the settings whose speed is measured."""
    return settings_of((Mode.EXACT, Mode.THRESHOLD), arguments.threshold or ADAPTER_THRESHOLDS)


def speed(
    checkpoint: Checkpoint, folder: Path, adapter: Path, arguments: argparse.Namespace, questions: list[Question]
) -> Json:
    """Return tokens per second of each setting and of llama.cpp, one request at a time."""
    options = EngineOptions(max_num_seqs=1, quantize=arguments.quantize)
    base_engine = Engine(checkpoint, options)
    adapter_engine = Engine(checkpoint, options, adapters=unnamed(load_adapter(adapter, folder)))
    answer = partial(one_by_one, max_tokens=arguments.speed_tokens)
    candidates: dict[str, Callable[[list[Question]], Sample]] = {
        setting.name: partial(answer, base_engine if setting is AR else adapter_engine, setting)
        for setting in speed_settings(arguments)
    }
    candidates[TEXT_ONLY] = partial(answer, base_engine, EXACT)
    try:
        kind = format_of(BITS[arguments.quantize])
        [peer] = llama_cpp_peers(folder, arguments.threads, checkpoint.mask_id, [kind])
        answers = answer_questions(base_engine, questions, AR.decode, arguments.speed_tokens)
        candidates[peer.name] = partial(
            peer_sample, peer, {result.request.prompt: len(result.tokens) for result in answers}
        )
        absent_peers = {}
    except PeerUnavailableError as error:
        absent_peers = {"llama.cpp": str(error)}
    starts = range(0, len(questions), ROUND_PROMPTS)[: arguments.rounds + 1]
    rounds = [questions[start : start + ROUND_PROMPTS] for start in starts]
    samples: dict[str, list[Sample]] = {name: [] for name in candidates}
    with ProgressLine("rounds", total=len(rounds)) as progress:
        for number, prompts in enumerate(rounds):
            order = list(candidates)
            for turn in range(len(order)):
                name = order[(number + turn) % len(order)]
                sample = candidates[name](prompts if number else prompts[:WARM_UP_PROMPTS])
                if number:
                    samples[name].append(sample)
            progress.update(number + 1, {})
    return {
        "prompts": sum(map(len, rounds[1:])),
        "max_tokens": arguments.speed_tokens,
        "absent": absent_peers,
        "settings": {
            name: speed_figures(runs, samples[AR.name]) | {"samples": [asdict(run) for run in runs]}
            for name, runs in samples.items()
        },
    }


def concurrent_speed(
    checkpoint: Checkpoint,
    folder: Path,
    adapter: Path,
    arguments: argparse.Namespace,
    questions: list[Question],
    callers: int,
) -> Json:
    """Return tokens per second of each setting with many requests at once, including prefill."""
    options = EngineOptions(max_num_seqs=callers, quantize=arguments.quantize)
    base_engine = Engine(checkpoint, options)
    adapter_engine = Engine(checkpoint, options, adapters=unnamed(load_adapter(adapter, folder)))
    prompts = (questions * callers)[: max(callers * ANSWERS_OF_A_CALLER, ROUND_PROMPTS)]

    def answer(setting: DecodingSetting) -> Sample:
        engine = base_engine if setting is AR else adapter_engine
        engine.clear_cache()
        started_s = time.perf_counter()
        answers = answer_questions(engine, prompts, setting.decode, arguments.speed_tokens)
        seconds = time.perf_counter() - started_s
        tokens = sum(len(result.tokens) for result in answers)
        forwards = sum(result.forwards for result in answers)
        return Sample(tokens=tokens, seconds=seconds, forwards=forwards)

    candidates = {setting.name: partial(answer, setting) for setting in speed_settings(arguments)}
    with ProgressLine(f"{callers} callers", total=len(candidates) * (arguments.rounds + 1)) as progress:
        samples = interleaved(candidates, arguments.rounds, progress)
    return {
        "callers": callers,
        "answers": len(prompts),
        "max_tokens": arguments.speed_tokens,
        "settings": {
            name: speed_figures(runs, samples[AR.name]) | {"times_exact": asdict(speedup(runs, samples[EXACT.name]))}
            for name, runs in samples.items()
        },
    }


def speed_figures(runs: Sequence[Sample], ar_runs: Sequence[Sample]) -> Json:
    """Return the speed of a setting, alone and relative to one token at a time."""
    return {
        "tokens_per_s": asdict(throughput(runs)),
        "times_ar": asdict(speedup(runs, ar_runs)),
        "tokens_per_forward": sum(run.tokens for run in runs) / sum(run.forwards for run in runs),
    }


def one_by_one(engine: Engine, setting: DecodingSetting, prompts: list[Question], *, max_tokens: int) -> Sample:
    """Answer one prompt after another; count the tokens and seconds after each first token."""
    tokens = 0
    forwards = 0
    seconds = 0.0
    for number, question in enumerate(prompts):
        sampling = SamplingParams(max_tokens=max_tokens)
        engine.clear_cache()
        request = Request(id=str(number), prompt=question.prompt, sampling=sampling, decode=setting.decode)
        begun = False
        started_s = time.perf_counter()
        for chunks in run_steps(engine, [request]):
            if begun:
                seconds += time.perf_counter() - started_s
                tokens += sum(len(chunk.tokens) for chunk in chunks)
                forwards += 1
            begun = begun or any(chunk.tokens for chunk in chunks)
            started_s = time.perf_counter()
    return Sample(tokens=tokens, seconds=seconds, forwards=forwards)


def peer_sample(peer: LlamaCpp, lengths: dict[tuple[int, ...], int], prompts: list[Question]) -> Sample:
    """Let llama.cpp answer one prompt after another, each with the length of the base's answer."""
    answers = [peer.answer([question.prompt], max(2, lengths[question.prompt])) for question in prompts]
    tokens = sum(len(answer.tokens[0]) - 1 for answer in answers)
    return Sample(tokens=tokens, seconds=sum(answer.decode_seconds for answer in answers), forwards=tokens)


if __name__ == "__main__":
    run_program("adapter", main)
