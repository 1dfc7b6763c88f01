"""Compare a full MARS fine-tune with the base model it began with.

    python -m benchmarks.full_finetune runs/full/model --base smollm2 --data ../shared/data --json full.json

Both read answers of people (perplexity), answer GSM8K questions (right answers), and general prompts, of which the
base judges the tokens (agreement). The fine-tuned model answers those at every setting; the block is that of its card.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scipy.stats import binomtest
from transformers import PreTrainedModel
from transformers.utils import logging

from benchmarks.adapter import MAX_TOKENS, SETTINGS, answered, questions
from benchmarks.quantized import Answer, conversations
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.options import EngineOptions
from mars_ray.evaluation.scoring.agreement import agreed_tokens
from mars_ray.evaluation.settings import AR
from mars_ray.measure import machine
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import model_label, resolve_model
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine

READ_TOKENS = 96
"""Most tokens of an answer written by people."""
BATCH = 16

Json = dict[str, Any]


@torch.no_grad()
def perplexity(network: PreTrainedModel, answers: Sequence[Answer]) -> float:
    """Return the perplexity of the answers, given their prompts."""
    loss, tokens = 0.0, 0
    for prompt, answer in answers:
        label_T = torch.tensor(answer[:READ_TOKENS])
        logits_TV = network(input_ids=torch.tensor([prompt + label_T.tolist()])).logits[0, len(prompt) - 1 : -1]
        loss += torch.nn.functional.cross_entropy(logits_TV.float(), label_T, reduction="sum").item()
        tokens += len(label_T)
    return math.exp(loss / tokens)


def judged(checkpoint: Checkpoint, base: Checkpoint, given: argparse.Namespace, workload: str) -> Json:
    """Return tokens per forward, agreement with the base and accuracy by setting."""
    given.workload = workload
    asked = questions(given, ChatEncoder(checkpoint.tokenizer))[: given.prompts]
    engine = Engine(checkpoint, EngineOptions(max_num_seqs=BATCH, compiled=False))
    found: dict[str, Json] = {}
    for setting in SETTINGS if checkpoint is not base and workload == "general" else (AR,):
        decode = setting.decode if setting is AR else replace(setting.decode, block=engine.block)
        answers = answered(engine, asked, decode, MAX_TOKENS[workload])
        pairs = [(each.request.prompt, tuple(each.tokens)) for each in answers]
        with ProgressLine(f"{workload}, {setting.name}", total=len(pairs)) as progress:
            agreed = sum(agreed_tokens(base.network, pairs, base.mask_id, progress))
        tokens = sum(len(each.tokens) for each in answers)
        found[setting.name] = {
            "tokens_per_forward": tokens / sum(each.forwards for each in answers),
            "agreement": agreed / tokens,
            "tokens": tokens,
        }
        if asked[0].judge:
            right = sum(bool(q.judge and q.judge(each.text)) for q, each in zip(asked, answers, strict=True))
            interval = list(binomtest(right, len(asked)).proportion_ci(method="wilson"))
            found[setting.name] |= {"right": right, "interval": interval}
    return found


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the fine-tuned model")
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with instruct/ and gsm8k/")
    parser.add_argument("--prompts", type=int, default=100, help="prompts of each kind")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    given.rounds = 0
    logging.disable_progress_bar()
    base = load_checkpoint(resolve_model(given.base), dtype=torch.bfloat16)
    read = conversations(given.base, given.data / "instruct" / "val.jsonl.gz")[: given.prompts]
    report: Json = {"machine": machine(), "dtype": "bfloat16", "prompts": given.prompts, "models": {}}
    for name in (given.base, given.model):
        folder = resolve_model(name)
        checkpoint = base if name == given.base else load_checkpoint(folder, dtype=torch.bfloat16)
        report["models"][model_label(name, folder)] = {
            "card": checkpoint.card.model_dump(mode="json") if checkpoint.card else None,
            "perplexity": perplexity(checkpoint.network, read),
            "reasoning": judged(checkpoint, base, given, "reasoning"),
            "general": judged(checkpoint, base, given, "general"),
        }
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["models"], indent=1))


if __name__ == "__main__":
    run_program("full_finetune", main)
