"""Compare our drafts from text with n-gram speculation of vLLM and with prompt lookup over llama.cpp.

    python -m benchmarks.drafts.peers --model smollm2 --callers 1 --callers 4 --json draft_peers.json
    python -m benchmarks.drafts.peers --model coder.gguf --adapter qwen2.5-coder-0.5b-instruct --bits 8

Every engine answers the same prompts of a task, as many at once as there are callers, with the same number of tokens.
Weights have 16 bits, or `--bits` in ours and llama.cpp. With an adapter, ours drafts from it, too. Each engine is
compared with itself one token at a time; all run in turns. A time is that of decoding after the prompts. Tasks with a
grammar or tools are left out, because the others have other grammars.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.drafts.workloads import workloads
from benchmarks.peers.llama_cpp import FORMATS, format_of, lookup_peers
from benchmarks.peers.own_engine import BITS, OwnEngine
from benchmarks.peers.peer import Peer, PeerUnavailableError
from benchmarks.peers.vllm import VLLM, vllm_peers
from benchmarks.report import write_report
from mars_ray.adapter.card import resolve_adapter
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.mode import Mode
from mars_ray.measure import Sample, deviation, interleaved
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine
from mars_ray.usable_cpus import usable_cpus

TASKS = ("edits", "summaries", "gsm8k", "chat")
MOST_PROMPT_TOKENS = 1200
ANSWER_TOKENS = 128
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


def engines_of(
    folder: Path, adapter: Path | None, bits: int, callers: int, threads: int, never_id: int
) -> tuple[list[tuple[Peer, Peer]], list[str]]:
    """Return pairs of engines without and with drafts, and the reasons why others are missing."""
    quantize = next(name for name, ours in BITS.items() if ours == bits)
    sizes = (folder, callers, MOST_PROMPT_TOKENS, quantize)
    pairs: list[tuple[Peer, Peer]] = [(OwnEngine(*sizes), OwnEngine(*sizes, Mode.EXACT, adapter))]
    absent = []
    try:
        [plain] = vllm_peers(folder, threads, never_id)
        pairs.append((plain, VLLM(folder, threads, NGRAM)))
    except PeerUnavailableError as error:
        absent.append(f"vllm: {error}")
    try:
        pairs.append(lookup_peers(folder, threads, never_id, format_of(bits)))
    except PeerUnavailableError as error:
        absent.append(f"llama.cpp: {error}")
    return pairs, absent


def measure(
    pairs: Sequence[tuple[Peer, Peer]], prompts: list[tuple[int, ...]], callers: int, rounds: int
) -> dict[str, Any]:
    """Return the decoding speed of each engine, as a multiple of its own speed without drafts."""
    groups = [prompts[start : start + callers] for start in range(0, len(prompts), callers)]
    answers: dict[str, list[list[int]]] = {}

    def candidate(peer: Peer) -> Callable[[], Sample]:
        def run() -> Sample:
            timed = [peer.answer(group, ANSWER_TOKENS) for group in groups]
            answers[peer.name] = [tokens for answer in timed for tokens in answer.tokens]
            return Sample(
                tokens=sum(len(tokens) - 1 for answer in timed for tokens in answer.tokens),
                seconds=sum(answer.decode_seconds for answer in timed),
                forwards=sum(answer.forwards for answer in timed),
            )

        return run

    peers = [peer for pair in pairs for peer in pair]
    with ProgressLine(f"{callers} callers", total=len(peers) * (rounds + 1)) as progress:
        samples = interleaved({peer.name: candidate(peer) for peer in peers}, rounds, progress)
    figures = {}
    for plain, drafting in pairs:
        runs = zip(samples[plain.name], samples[drafting.name], strict=True)
        times = [with_drafts.tokens_per_s / without.tokens_per_s for without, with_drafts in runs]
        figures[drafting.name] = {
            "plain_tokens_per_s": mean(run.tokens_per_s for run in samples[plain.name]),
            "tokens_per_s": mean(run.tokens_per_s for run in samples[drafting.name]),
            "times_plain": mean(times),
            "times_plain_std": deviation(times),
            "same_answers": sum(map(list.__eq__, answers[plain.name], answers[drafting.name])),
        }
    return figures


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapter", help="name or folder")
    parser.add_argument("--bits", type=int, choices=FORMATS.values(), default=16)
    parser.add_argument("--callers", type=int, action="append")
    parser.add_argument("--task", action="append", choices=TASKS)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    threads = usable_cpus()
    torch.set_num_threads(threads)
    folder, adapter = resolve_model(arguments.model), resolve_adapter(arguments.adapter)
    checkpoint = load_checkpoint(folder)
    encoder, never_id = ChatEncoder(checkpoint.tokenizer), checkpoint.mask_id
    del checkpoint
    columns = ("task", "callers", "engine", "plain, tokens/s", "with drafts", "times plain", "same answers")
    table = Table(*columns, title=f"{arguments.model}, {arguments.bits} bits, {arguments.rounds} rounds in turns")
    runs = []
    for callers in arguments.callers or [1, 4]:
        pairs, absent = engines_of(folder, adapter, arguments.bits, callers, threads, never_id)
        for reason in absent:
            print(reason, flush=True)
        for work in workloads(max(arguments.conversations, callers)):
            if work.name not in (arguments.task or TASKS):
                continue
            prompts = [tuple(encoder.prompt(messages))[-MOST_PROMPT_TOKENS:] for messages in work.conversations]
            figures = {"task": work.name, "callers": callers, **measure(pairs, prompts, callers, arguments.rounds)}
            print(json.dumps(figures), flush=True)
            runs.append(figures)
            for _, drafting in pairs:
                row = figures[drafting.name]
                speeds = (f"{row['plain_tokens_per_s']:,.0f}", f"{row['tokens_per_s']:,.0f}")
                times = f"{row['times_plain']:.2f} ± {row['times_plain_std']:.2f}"
                same = f"{row['same_answers']} of {len(prompts)}"
                table.add_row(work.name, str(callers), drafting.name, *speeds, times, same)
    Console(width=140).print(table)
    options = {name: value for name, value in vars(arguments).items() if name != "json"}
    write_report(arguments.json, {**options, "runs": runs})


if __name__ == "__main__":
    run_program("benchmarks.drafts.peers", main)
