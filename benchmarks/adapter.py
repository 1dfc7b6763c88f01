"""Measure an adapter on one workload at each setting: agreement, accuracy, and speed relative to its base.

    python -m benchmarks.adapter general --model smollm2 --adapter runs/smollm2/model --json adapter.json
    python -m benchmarks.adapter reasoning --model smollm2 --adapter runs/smollm2/model --json adapter.json
    python -m benchmarks.adapter structure --model runs/structure/base/model --adapter runs/structure/model \\
        --tasks data/structure/heldout.jsonl --json adapter.json
    python -m benchmarks.adapter curve --model smollm2 --adapter runs/smollm2/adapters --json adapter.json

`general` asks the held-out prompts of the instruction data, `reasoning` GSM8K, `structure` a file of
`pipelines/structure_tasks.py`. Quality comes from many prompts in batches, the block that of the adapter. Speed
is of one request at a time, in rounds of other prompts each: in a round every setting answers the same ones in turn,
and so does llama.cpp where it is installed, with as many tokens. It counts what comes behind the first token. `curve`
asks every adapter that a run kept for its tokens per forward in exact mode, and fits a line to them over the logarithm
of what it was trained on. With `--callers 16` exact mode and `ar` answer so many at once, in turns, and nothing else is
measured. Each call adds to the file, and to a table beside it.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest
from transformers.utils import logging

from benchmarks.adapter_report import fit, markdown
from benchmarks.peers.llama_cpp import LlamaCpp, llama_cpp_peers
from benchmarks.peers.peer import PeerUnavailableError
from mars_ray.adapter.card import read_adapter_card, resolve_adapter, unnamed
from mars_ray.adapter.folder import load_adapter
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.prompt_file import Conversation, read_prompts
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import OfflineResult, decode_all, run_steps
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.errors import ConfigError
from mars_ray.evaluation.scoring.agreement import agreed_tokens
from mars_ray.evaluation.scoring.statistics import mcnemar
from mars_ray.evaluation.settings import AR, EXACT, DecodingSetting, settings_of
from mars_ray.evaluation.tasks.registry import TaskOptions, open_tasks
from mars_ray.evaluation.tasks.verify import MATCHES
from mars_ray.measure import Sample, interleaved, machine, speedup, throughput
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import model_label, resolve_model
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine

SETTINGS = settings_of((Mode.EXACT, Mode.THRESHOLD), (0.95, 0.9, 0.8, 0.7, 0.5))
ROUND_PROMPTS, WARM_UP_PROMPTS = 10, 3
SPEED_TOKENS = 48
"""Most tokens of an answer when speed is measured."""
CURVE_PROMPTS = 24
ANSWERS_OF_A_CALLER = 3
BATCH = 16
PROMPT_TOKENS_MAX = 384
MAX_TOKENS = {"general": 128, "reasoning": 192, "structure": 192}

Json = dict[str, Any]
Judge = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt as tokens, with the reference of its answer if there is one."""

    prompt: tuple[int, ...]
    judge: Judge | None


def main() -> None:
    """Measure one workload or the curve, and update the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=[*MAX_TOKENS, "curve"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapter", required=True, help="name or folder; for curve the folder of saved adapters")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with instruct/ and gsm8k/")
    parser.add_argument("--tasks", type=Path, help="prompts with references, for structure")
    parser.add_argument("--prompts", type=int, default=100, help="number of prompts")
    parser.add_argument("--rounds", type=int, default=6, help=f"rounds of {ROUND_PROMPTS} prompts; 0 skips speed")
    parser.add_argument("--callers", type=int, action="append", help="measure this many callers instead; repeatable")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    report: Json = json.loads(given.json.read_text()) if given.json.exists() else {"workloads": {}}
    report |= {"machine": machine(), "dtype": "bfloat16", "threads": given.threads}
    folder = resolve_model(given.model)
    checkpoint = load_checkpoint(folder, dtype=torch.bfloat16)
    asked = questions(given, ChatEncoder(checkpoint.tokenizer))
    if given.workload == "curve":
        report["curve"] = curve(checkpoint, folder, Path(given.adapter), asked[:CURVE_PROMPTS])
    else:
        found = report["workloads"].setdefault(given.workload, {})
        adapter = resolve_adapter(given.adapter)
        assert adapter is not None
        found |= about(given.model, folder, adapter)
        if given.callers:
            found["callers"] = [together(checkpoint, folder, adapter, given, asked, each) for each in given.callers]
        if given.prompts and not given.callers:
            found["quality"] = quality(checkpoint, folder, adapter, asked, MAX_TOKENS[given.workload])
        if given.rounds and not given.callers:
            found["speed"] = speed(checkpoint, folder, adapter, given, asked)
    given.json.write_text(json.dumps(report, indent=1) + "\n")
    given.json.with_suffix(".md").write_text(markdown(report))
    print(markdown(report))


def about(model: str, folder: Path, adapter: Path) -> Json:
    """Return the report."""
    card = read_adapter_card(adapter)
    trained = {"steps": card.steps, "tokens": card.tokens, "block": card.block, "data": card.data}
    return {"model": model_label(model, folder), "adapter": trained}


def questions(given: argparse.Namespace, encoder: ChatEncoder) -> list[Question]:
    """Return the questions of a workload that have a short prompt."""
    count = max(given.prompts, given.rounds * ROUND_PROMPTS + ROUND_PROMPTS)
    if given.workload in ("general", "curve"):
        texts = read_prompts(given.data / "instruct" / "val.jsonl.gz")
        pairs: list[tuple[Conversation, Judge | None]] = [(first_question(text), None) for text in texts]
    else:
        if given.workload == "structure" and given.tasks is None:
            raise ConfigError("structure is a file of tasks: name it with --tasks.")
        name = "gsm8k" if given.workload == "reasoning" else str(given.tasks)
        [task] = open_tasks((name,), TaskOptions(seeds=1, data=given.data))
        pairs = [(each.messages, partial(MATCHES[each.match], each.reference)) for each in task.questions]
    found = (Question(tuple(encoder.prompt(messages)), judge) for messages, judge in pairs)
    return list(islice((each for each in found if len(each.prompt) <= PROMPT_TOKENS_MAX), count))


def first_question(text: Conversation) -> Conversation:
    """Return the messages before the first answer."""
    return tuple(takewhile(lambda message: message["role"] != "assistant", text))


def quality(checkpoint: Checkpoint, folder: Path, adapter: Path, asked: list[Question], tokens: int) -> Json:
    """Return agreement with the base and accuracy of the answers at each setting."""
    loaded = load_adapter(adapter, folder)
    engine = Engine(checkpoint, EngineOptions(max_num_seqs=BATCH, compiled=False), adapters=unnamed(loaded))
    answers: dict[str, list[OfflineResult]] = {}
    with ProgressLine("answers", total=len(SETTINGS)) as progress:
        for number, setting in enumerate(SETTINGS):
            decode = DecodeParams(mode=setting.mode, threshold=setting.threshold, block=engine.block)
            answers[setting.name] = answered(engine, asked, decode, tokens)
            progress.update(number + 1, {})
    different = sorted({(each.request.prompt, tuple(each.tokens)) for of in answers.values() for each in of})
    with ProgressLine("compare with the base", total=len(different)) as progress:
        counts = agreed_tokens(checkpoint.network, different, checkpoint.mask_id, progress)
    agreed = dict(zip(different, counts, strict=True))
    right = {
        name: np.array([bool(q.judge and q.judge(each.text)) for q, each in zip(asked, of, strict=True)], np.int8)
        for name, of in answers.items()
    }
    figures: Json = {}
    for name, of in answers.items():
        total = sum(len(each.tokens) for each in of)
        figures[name] = {
            "tokens": total,
            "tokens_per_forward": total / sum(each.forwards for each in of),
            "agreement": sum(agreed[each.request.prompt, tuple(each.tokens)] for each in of) / total,
            "same_answers": sum(one.tokens == ar.tokens for one, ar in zip(of, answers[AR.name], strict=True)),
        }
        if asked[0].judge:
            change = right[name] - right[AR.name]
            count = int(right[name].sum())
            figures[name] |= {
                "right": count,
                "interval": list(binomtest(count, len(asked)).proportion_ci(method="wilson")),
                "better": int((change > 0).sum()),
                "worse": int((change < 0).sum()),
                "p_value": mcnemar(int((change > 0).sum()), int((change < 0).sum())),
            }
    return {"prompts": len(asked), "max_tokens": tokens, "settings": figures}


def answered(engine: Engine, asked: list[Question], decode: DecodeParams, tokens: int) -> list[OfflineResult]:
    """Return the answers in the order of the questions."""
    sampling = SamplingParams(max_tokens=tokens)
    requests = (
        Request(id=str(number), prompt=each.prompt, sampling=sampling, decode=decode)
        for number, each in enumerate(asked)
    )
    return sorted(decode_all(engine, requests), key=lambda each: int(each.request.id))


def speed(
    checkpoint: Checkpoint, folder: Path, adapter: Path, given: argparse.Namespace, asked: list[Question]
) -> Json:
    """Return tokens per second of each setting and of llama.cpp, one request at a time."""
    options = EngineOptions(max_num_seqs=1)
    alone = Engine(checkpoint, options)
    adapted = Engine(checkpoint, options, adapters=unnamed(load_adapter(adapter, folder)))
    ways: dict[str, Callable[[list[Question]], Sample]] = {
        each.name: partial(one_by_one, alone if each is AR else adapted, each) for each in SETTINGS
    }
    try:
        peer = next(each for each in llama_cpp_peers(folder, given.threads, checkpoint.mask_id) if each.bits == 16)
        answers = answered(alone, asked, AR.decode, SPEED_TOKENS)
        ways[peer.name] = partial(of_peer, peer, {each.request.prompt: len(each.tokens) for each in answers})
        absent = {}
    except PeerUnavailableError as error:
        absent = {"llama.cpp": str(error)}
    rounds = [asked[start : start + ROUND_PROMPTS] for start in range(0, len(asked), ROUND_PROMPTS)]
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    with ProgressLine("rounds", total=given.rounds + 1) as progress:
        for number, prompts in enumerate(rounds[: given.rounds + 1]):
            order = list(ways)
            for place in range(len(order)):
                name = order[(number + place) % len(order)]
                sample = ways[name](prompts if number else prompts[:WARM_UP_PROMPTS])
                if number:
                    samples[name].append(sample)
            progress.update(number + 1, {})
    return {
        "prompts": given.rounds * ROUND_PROMPTS,
        "max_tokens": SPEED_TOKENS,
        "absent": absent,
        "settings": {
            name: {
                "tokens_per_s": asdict(throughput(each)),
                "times_ar": asdict(speedup(each, samples[AR.name])),
                "tokens_per_forward": sum(one.tokens for one in each) / sum(one.forwards for one in each),
                "samples": [asdict(one) for one in each],
            }
            for name, each in samples.items()
        },
    }


def together(
    checkpoint: Checkpoint, folder: Path, adapter: Path, given: argparse.Namespace, asked: list[Question], callers: int
) -> Json:
    """Return tokens per second of exact mode and of the base with many requests at once, prefill included."""
    options = EngineOptions(max_num_seqs=callers)
    engines = {
        AR: Engine(checkpoint, options),
        EXACT: Engine(checkpoint, options, adapters=unnamed(load_adapter(adapter, folder))),
    }
    prompts = (asked * callers)[: max(callers * ANSWERS_OF_A_CALLER, ROUND_PROMPTS)]

    def answer(setting: DecodingSetting) -> Sample:
        engines[setting].clear_cache()
        started_s = time.perf_counter()
        answers = answered(engines[setting], prompts, setting.decode, SPEED_TOKENS)
        seconds = time.perf_counter() - started_s
        tokens, forwards = sum(len(each.tokens) for each in answers), sum(each.forwards for each in answers)
        return Sample(tokens=tokens, seconds=seconds, forwards=forwards)

    ways = {setting.name: partial(answer, setting) for setting in engines}
    with ProgressLine(f"{callers} callers", total=len(ways) * (given.rounds + 1)) as progress:
        samples = interleaved(ways, given.rounds, progress)
    return {
        "callers": callers,
        "answers": len(prompts),
        "max_tokens": SPEED_TOKENS,
        "ar": asdict(throughput(samples[AR.name])),
        "exact": asdict(throughput(samples[EXACT.name])),
        "times_ar": asdict(speedup(samples[EXACT.name], samples[AR.name])),
        "tokens_per_forward": sum(each.tokens for each in samples[EXACT.name])
        / sum(each.forwards for each in samples[EXACT.name]),
    }


def one_by_one(engine: Engine, setting: DecodingSetting, prompts: list[Question]) -> Sample:
    """Answer one prompt after another; count the tokens and seconds after each first token."""
    tokens, forwards, seconds = 0, 0, 0.0
    for number, each in enumerate(prompts):
        sampling = SamplingParams(max_tokens=SPEED_TOKENS)
        engine.clear_cache()
        request = Request(id=str(number), prompt=each.prompt, sampling=sampling, decode=setting.decode)
        begun = False
        started_s = time.perf_counter()
        for chunks in run_steps(engine, [request]):
            if begun:
                seconds += time.perf_counter() - started_s
                tokens, forwards = tokens + sum(len(chunk.tokens) for chunk in chunks), forwards + 1
            begun = begun or any(chunk.tokens for chunk in chunks)
            started_s = time.perf_counter()
    return Sample(tokens=tokens, seconds=seconds, forwards=forwards)


def of_peer(peer: LlamaCpp, lengths: dict[tuple[int, ...], int], prompts: list[Question]) -> Sample:
    """Let llama.cpp answer one prompt after another, with the lengths of the base's answers."""
    done = [peer.answer([each.prompt], max(2, lengths[each.prompt])) for each in prompts]
    tokens = sum(len(each.tokens[0]) - 1 for each in done)
    return Sample(tokens=tokens, seconds=sum(each.decode_seconds for each in done), forwards=tokens)


def curve(checkpoint: Checkpoint, folder: Path, kept: Path, asked: list[Question]) -> Json:
    """Return tokens per forward in exact mode of every adapter in `kept`, by tokens of training."""
    points = []
    for adapter in sorted(kept.iterdir()):
        engine = Engine(checkpoint, EngineOptions(max_num_seqs=1), adapters=unnamed(load_adapter(adapter, folder)))
        one_by_one(engine, EXACT, asked[:WARM_UP_PROMPTS])  # it learns what to feed
        sample = one_by_one(engine, EXACT, asked)
        card = read_adapter_card(adapter)
        points.append({"steps": card.steps, "tokens": card.tokens, "value": sample.tokens / sample.forwards})
    return {"prompts": len(asked), "max_tokens": SPEED_TOKENS, "points": points, "fit": fit(points)}


if __name__ == "__main__":
    run_program("adapter", main)
