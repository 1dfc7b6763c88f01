"""Check that greedy decoding gives the same tokens in the engine and in transformers.

    python -m benchmarks.greedy_equality --prompts ../shared/data/instruct/val.jsonl.gz --json equal.json
    python -m benchmarks.greedy_equality --prompts ... --adapter runs/smollm2/model --dtype bfloat16

The engine answers all prompts, many at a time. Each answer is then fed to plain transformers after its prompt, in one
forward. The most likely token at each position must be the engine's token; this is equivalent to `generate` in a
thirtieth of the time. Some answers are also compared with `generate` itself. If the two tokens' logits differ by less
than the rounding error of the dtype, the difference is counted as a tie.

Without an adapter the engine decodes one token at a time. With one it decodes in exact mode, and its answers must equal
those of the base: compared with transformers as above, and with the engine's own `ar`, greedy and sampled with seeds,
where every token must be equal.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from benchmarks.report import command_line
from mars_ray.adapter.card import resolve_adapter, unnamed
from mars_ray.adapter.folder import load_adapter
from mars_ray.cli.shared import write_json
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.prompt_file import read_prompts
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import decode_all
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.measure import machine
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.digest import folder_digest
from mars_ray.model.resolve import pin, resolve_model
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine

TIE = {"float32": 1e-4, "bfloat16": 0.5}
"""Largest difference of logits that counts as a tie. The order of summation changes the fifth digit in float32. In
bfloat16 it changes the output by a few steps of 0.125, the resolution of logits from 16 to 32."""
PROMPT_TOKENS_MAX = 256
AR = DecodeParams(mode=Mode.AR)


def compare_tokens(
    network: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], tie: float
) -> tuple[Counter[str], float]:
    """Return the number of equal, tied and different tokens, and the widest gap of a tie."""
    with torch.inference_mode():
        logits_TV = network(torch.tensor([[*prompt, *answer[:-1]]]), logits_to_keep=len(answer)).logits[0].float()
    taken_T = torch.tensor(answer)
    gap_T = logits_TV.max(dim=-1).values - logits_TV.gather(1, taken_T[:, None])[:, 0]
    same_T = logits_TV.argmax(dim=-1) == taken_T
    tied_T = ~same_T & (gap_T < tie)
    counts = Counter(same=int(same_T.sum()), tied=int(tied_T.sum()), other=int((~same_T & ~tied_T).sum()))
    return counts, float(gap_T[tied_T].max()) if tied_T.any() else 0.0


def generate_answer(network: PreTrainedModel, prompt: Sequence[int], room: int, stop_ids: frozenset[int]) -> list[int]:
    """Return the answer of transformers' `generate`."""
    ids = torch.tensor([prompt])
    settings = GenerationConfig(do_sample=False, max_new_tokens=room, eos_token_id=sorted(stop_ids), pad_token_id=0)
    tokens: list[int] = network.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)[
        0, len(prompt) :
    ].tolist()
    return tokens


def engine_answers(
    engine: Engine, prompts: Sequence[Sequence[int]], room: int, decode: DecodeParams, *, drawn: bool
) -> tuple[list[list[int]], int]:
    """Return the engine's answers and its number of forwards; `drawn` samples with a seed per prompt."""
    requests = (
        Request(
            id=str(number),
            prompt=tuple(prompt),
            sampling=SamplingParams(max_tokens=room, temperature=float(drawn), seed=number),
            decode=decode,
        )
        for number, prompt in enumerate(prompts)
    )
    answers: dict[int, list[int]] = {}
    forwards = 0
    with ProgressLine(f"answers of the engine, {decode.mode.value}", total=len(prompts)) as progress:
        for result in decode_all(engine, requests):
            answers[int(result.request.id)] = result.tokens
            forwards += result.forwards
            progress.update(len(answers), {})
    return [answers[number] for number in range(len(prompts))], forwards


def exact_of(engine: Engine) -> DecodeParams:
    """Return exact mode with masks in every step; by default the engine feeds few masks to large batches."""
    return DecodeParams(mode=Mode.EXACT, block=engine.block)


def against_own_ar(engine: Engine, prompts: Sequence[Sequence[int]], room: int) -> dict[str, Any]:
    """Return the number of answers in exact mode that equal autoregressive decoding, greedy and sampled."""
    counts: dict[str, Any] = {}
    for name, drawn in (("greedy", False), ("drawn", True)):
        exact_answers, forwards = engine_answers(engine, prompts, room, exact_of(engine), drawn=drawn)
        ar_answers, _ = engine_answers(engine, prompts, room, AR, drawn=drawn)
        equal = sum(one == other for one, other in zip(exact_answers, ar_answers, strict=True))
        counts[name] = {"equal": equal, "tokens_per_forward": sum(map(len, exact_answers)) / forwards}
    return counts


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    """Decode, compare, and return all counts."""
    model = arguments.model
    room = arguments.max_tokens
    sample = arguments.generate
    folder = resolve_model(model)
    dtype = getattr(torch, arguments.dtype)
    adapter_folder = resolve_adapter(arguments.adapter)
    adapter = load_adapter(adapter_folder, folder) if adapter_folder else None
    checkpoint = load_checkpoint(folder, dtype=dtype)
    encoder = ChatEncoder(checkpoint.tokenizer)
    texts = read_prompts(arguments.prompts)
    random.Random(0).shuffle(texts)
    questions = (list(takewhile(lambda message: message["role"] != "assistant", text)) for text in texts)
    encoded = map(encoder.prompt, questions)
    prompts = [prompt for prompt in encoded if len(prompt) <= PROMPT_TOKENS_MAX][: arguments.count]
    options = EngineOptions(max_num_seqs=arguments.batch)
    engine = Engine(checkpoint, options, adapters=unnamed(adapter))
    started_s = time.perf_counter()
    answers, forwards = engine_answers(engine, prompts, room, exact_of(engine) if adapter else AR, drawn=False)
    engine_s = time.perf_counter() - started_s
    own_ar = against_own_ar(engine, prompts, room) if adapter else None
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False).eval()
    total = Counter[str]()
    widest = 0.0
    started_s = time.perf_counter()
    with ProgressLine("forwards of transformers", total=len(prompts)) as progress:
        for number, prompt in enumerate(prompts):
            counts, gap = compare_tokens(reference, prompt, answers[number], TIE[arguments.dtype])
            total += counts
            widest = max(widest, gap)
            progress.update(number + 1, dict(total))
    forward_s = time.perf_counter() - started_s
    equal = 0
    started_s = time.perf_counter()
    with ProgressLine("generate of transformers", total=sample) as progress:
        for number, prompt in enumerate(prompts[:sample]):
            equal += generate_answer(reference, prompt, room, checkpoint.stop_ids) == answers[number]
            progress.update(number + 1, {"equal": equal})
    return {
        "model": pin(model, folder),
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_new_tokens": room,
        "batch": arguments.batch,
        "dtype": arguments.dtype,
        "adapter": adapter_folder and folder_digest(adapter_folder),
        "tokens_per_forward": sum(map(len, answers)) / forwards,
        "equal_to_own_ar": own_ar,
        "tokens": {name: total[name] for name in ("same", "tied", "other")},
        "widest_tie": widest,
        "generate": {"answers": min(sample, len(prompts)), "equal": equal},
        "seconds": {"engine": engine_s, "forwards": forward_s, "generate": time.perf_counter() - started_s},
    }


def main() -> None:
    """Check, print and write; exit with 1 if a token differs."""
    parser = argparse.ArgumentParser(description="Compare the engine with transformers, token by token.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapter", help="adapter for the model; the engine then decodes in exact mode")
    parser.add_argument("--dtype", choices=sorted(TIE), default="float32")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL or parquet with 'prompt' or 'messages'")
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--generate", type=int, default=50, help="answers to compare with `generate`")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    facts = machine()  # first, because a commit made during the run would change it
    result = check(arguments)
    print(json.dumps(result, indent=1))
    write_json(arguments.json, {"command": command_line(), "machine": facts} | result)
    own_ar = result["equal_to_own_ar"] or {}
    if result["tokens"]["other"] or any(figures["equal"] < result["prompts"] for figures in own_ar.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    run_program("greedy_equality", main)
