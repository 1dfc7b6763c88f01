"""Measure the loss from quantized weights: agreement with bfloat16, and perplexity of answers written by people.

    python -m benchmarks.quantized --model smollm2 --json quantized.json

The model answers prompts in bfloat16, one token at a time. Every format then reads the same answers; agreement is the
share of their tokens that are the format's most likely tokens too. Perplexity is measured on the answers in the data.
"""

import argparse
import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import write_report
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import decode_all
from mars_ray.engine.kernels.decoder import FusedDecoder
from mars_ray.engine.kv.cache import SlotKVCache
from mars_ray.engine.kv.forward_batch import ForwardBatch, SlotSpan
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.measure import deviation
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine

DATA = Path("../shared/data/instruct/val.jsonl.gz")
FORMATS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.bfloat16, "int8"),
    "int4": (torch.bfloat16, "int4"),
}
MOST = 1024
"""Largest number of tokens of a prompt with its answer; longer pairs are skipped."""

Answer = tuple[list[int], list[int]]
"""Tokens of a prompt, and tokens of its answer."""


def conversations(model: str, path: Path) -> list[Answer]:
    """Return the first question and answer of each conversation in `path`."""
    tokenizer = load_checkpoint(resolve_model(model)).tokenizer
    encoder = ChatEncoder(tokenizer)
    answers = []
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            question, reply = json.loads(line)["messages"][:2]
            prompt = list(encoder.prompt([question]))
            answer = tokenizer(reply["content"], add_special_tokens=False)["input_ids"]
            if answer and len(prompt) + len(answer) <= MOST:
                answers.append((prompt, answer))
    return answers


def own_answers(model: str, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
    """Let the model answer in bfloat16, one token at a time, greedily."""
    checkpoint = load_checkpoint(resolve_model(model), dtype=torch.bfloat16)
    engine = Engine(checkpoint, EngineOptions(max_num_seqs=16))
    sampling = SamplingParams(max_tokens=tokens)
    decode = DecodeParams(mode=Mode.AR)
    requests = [
        Request(id=str(n), prompt=tuple(prompt), sampling=sampling, decode=decode) for n, prompt in enumerate(prompts)
    ]
    with ProgressLine("answer", total=len(requests)) as progress:
        answers = {}
        for result in decode_all(engine, iter(requests)):
            answers[int(result.request.id)] = list(result.tokens)
            progress.update(len(answers), {})
    return [(prompt, answers[number]) for number, prompt in enumerate(prompts) if answers[number]]


def read(model: str, name: str, model_answers: Sequence[Answer], human_answers: Sequence[Answer]) -> dict[str, Any]:
    """Return agreement on the model's answers and perplexity of people's answers, in one format."""
    dtype, quantize = FORMATS[name]
    checkpoint = load_checkpoint(resolve_model(model), dtype=dtype)
    decoder = FusedDecoder(checkpoint.network, mask_id=checkpoint.mask_id, quantize=quantize, consume=True)
    cache = SlotKVCache(checkpoint.network.config, dtype, torch.device("cpu"))
    cache.resize(1, MOST)
    agreements = []
    losses = []
    with ProgressLine(f"read in {name}", total=len(model_answers) + len(human_answers)) as progress:
        for number, (prompt, answer) in enumerate([*model_answers, *human_answers], start=1):
            ids = torch.tensor(prompt + answer)
            picks = torch.arange(len(prompt) - 1, len(ids) - 1)
            likeliest, _, logits, _ = decoder.forward(cache.layers, _batch_of(ids, picks))
            if number <= len(model_answers):
                agreements.append(mean(one == other for one, other in zip(likeliest, answer, strict=True)))
            else:
                losses.append((torch.nn.functional.cross_entropy(logits, ids[picks + 1]).item(), len(answer)))
            progress.update(number, {})
    tokens = sum(count for _, count in losses)
    return {
        "agreement": mean(agreements),
        "agreement_std": deviation(agreements),
        "same_answers": mean(agreement == 1 for agreement in agreements),
        "perplexity": math.exp(sum(loss * count for loss, count in losses) / tokens),
        "tokens": tokens,
    }


def _batch_of(id_N: torch.Tensor, pick_M: torch.Tensor) -> ForwardBatch:
    """Return a batch that forwards one text in slot 0."""
    position_N = torch.arange(len(id_N))
    zero_N = torch.zeros_like(id_N)
    none_N = torch.full_like(id_N, -1)
    return ForwardBatch(
        id_N=id_N,
        slot_N=zero_N,
        position_N=position_N,
        target_N=position_N,
        prefix_N=position_N + 1,
        behind_N=zero_N,
        offset_N=none_N,
        adapter_N=none_N,
        pick_M=pick_M,
        spans=[SlotSpan(0, len(id_N), len(id_N))],
        kv_tokens=0,
    )


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description="Measure the loss from quantized weights.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--answers", type=int, default=200, help="the model's own answers")
    parser.add_argument("--people", type=int, default=200, help="answers from the data")
    parser.add_argument("--tokens", type=int, default=96, help="most tokens of an answer")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.data.exists():
        parser.error(f"{arguments.data} does not exist; name the data with --data")
    human = conversations(arguments.model, arguments.data)
    step = max(1, len(human) // arguments.answers)
    model_answers = own_answers(
        arguments.model, [prompt for prompt, _ in human[::step]][: arguments.answers], arguments.tokens
    )
    human = human[:: max(1, len(human) // arguments.people)][: arguments.people]
    results = {name: read(arguments.model, name, model_answers, human) for name in FORMATS}
    columns = ("weights", "agreement with bfloat16", "answers wholly the same", "perplexity")
    table = Table(*columns, title=f"{arguments.model}: {len(model_answers)} own answers, {len(human)} of people")
    for name, figures in results.items():
        agreement = f"{figures['agreement']:.4f} ± {figures['agreement_std']:.4f}"
        table.add_row(name, agreement, f"{figures['same_answers']:.3f}", f"{figures['perplexity']:.3f}")
    Console().print(table)
    report = {"model": arguments.model, "own": len(model_answers), "human": len(human), "formats": results}
    write_report(arguments.json, report)


if __name__ == "__main__":
    run_program("benchmarks.quantized", main)
