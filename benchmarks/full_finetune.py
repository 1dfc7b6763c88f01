"""Compare a full MARS fine-tune with its base model.

    python -m benchmarks.full_finetune runs/full/model --base smollm2 --data ../shared/data --json full.json

It compares the perplexity of answers written by people, right answers on GSM8K, and agreement on general prompts: the
share of tokens that the base would choose. The fine-tuned model answers the general prompts at every setting, with the
block of its card.
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

from benchmarks.adapter import MAX_TOKENS, SETTINGS, answer_questions, read_questions
from benchmarks.quantized import Answer, conversations
from benchmarks.report import write_report
from mars_ray.data.chat import ChatEncoder
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.options import EngineOptions
from mars_ray.evaluation.agreement import agreed_tokens
from mars_ray.evaluation.settings import AR
from mars_ray.model.checkpoint import Checkpoint, load_checkpoint
from mars_ray.model.resolve import model_label, resolve_model
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine

READ_TOKENS = 96
"""Largest number of tokens read of an answer written by people."""
BATCH = 16

Json = dict[str, Any]


@torch.no_grad()
def perplexity(network: PreTrainedModel, answers: Sequence[Answer]) -> float:
    """Return the perplexity of the answers, given their prompts."""
    loss = 0.0
    tokens = 0
    for prompt, answer in answers:
        label_T = torch.tensor(answer[:READ_TOKENS])
        logits_TV = network(input_ids=torch.tensor([prompt + label_T.tolist()])).logits[0, len(prompt) - 1 : -1]
        loss += torch.nn.functional.cross_entropy(logits_TV.float(), label_T, reduction="sum").item()
        tokens += len(label_T)
    return math.exp(loss / tokens)


def judge_answers(checkpoint: Checkpoint, base: Checkpoint, workload: str, data: Path, prompts: int) -> Json:
    """Return tokens per forward, agreement with the base and accuracy by setting."""
    questions = read_questions(workload, prompts, ChatEncoder(checkpoint.tokenizer), data)
    engine = Engine(checkpoint, EngineOptions(max_num_seqs=BATCH))
    figures: dict[str, Json] = {}
    for setting in SETTINGS if checkpoint is not base and workload == "general" else (AR,):
        decode = setting.decode if setting is AR else replace(setting.decode, block=engine.block)
        answers = answer_questions(engine, questions, decode, MAX_TOKENS[workload])
        pairs = [(result.request.prompt, tuple(result.tokens)) for result in answers]
        with ProgressLine(f"{workload}, {setting.name}", total=len(pairs)) as progress:
            agreed = sum(agreed_tokens(base.network, pairs, base.mask_id, progress))
        tokens = sum(len(result.tokens) for result in answers)
        figures[setting.name] = {
            "tokens_per_forward": tokens / sum(result.forwards for result in answers),
            "agreement": agreed / tokens,
            "tokens": tokens,
        }
        if questions[0].judge:
            right = sum(bool(q.judge and q.judge(result.text)) for q, result in zip(questions, answers, strict=True))
            interval = list(binomtest(right, len(questions)).proportion_ci(method="wilson"))
            figures[setting.name] |= {"right": right, "interval": interval}
    return figures


def main() -> None:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the fine-tuned model")
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with instruct/ and gsm8k/")
    parser.add_argument("--prompts", type=int, default=100, help="prompts of each kind")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    base = load_checkpoint(resolve_model(arguments.base), dtype=torch.bfloat16)
    human_answers = conversations(arguments.base, arguments.data / "instruct" / "val.jsonl.gz")[: arguments.prompts]
    models: Json = {}
    for name in (arguments.base, arguments.model):
        folder = resolve_model(name)
        checkpoint = base if name == arguments.base else load_checkpoint(folder, dtype=torch.bfloat16)
        models[model_label(name, folder)] = {
            "card": checkpoint.card.model_dump(mode="json") if checkpoint.card else None,
            "perplexity": perplexity(checkpoint.network, human_answers),
            **{
                workload: judge_answers(checkpoint, base, workload, arguments.data, arguments.prompts)
                for workload in ("reasoning", "general")
            },
        }
        write_report(arguments.json, {"dtype": "bfloat16", "prompts": arguments.prompts, "models": models})
    print(json.dumps(models, indent=1))


if __name__ == "__main__":
    run_program("full_finetune", main)
