"""Train an adapter for any model, on conversations or on the model's own answers.

    python -m pipelines.adapt --model smollm2 --data train.jsonl.gz --heldout val.jsonl.gz --own 2000

1. The model answers held-out prompts with `generate` (Ray Data), one token at a time. All measurements use these
   answers. With `--own` the model also answers prompts of the data, and the adapter is trained on these answers instead
   of the answers in the data, because it will have to predict the model's own text.
2. Ray Train trains the adapter on the conversations, with the model as teacher at every mask. With `--from`, training
   starts from an existing adapter.
3. The adapter is calibrated, and the curve is written into its card.
4. The adapter is evaluated: an answer is correct if it equals the answer of the model.

Finished steps are kept, so the same command resumes after Ctrl-C, a kill or a reboot. In the output folder, `model` is
the adapter, `metrics.jsonl` has the metrics of each training step, and `evaluation` has the report.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging

from mars_ray.adapter.card import read_adapter_card
from mars_ray.data.dropped_records import MAX_DROPPED, DroppedRecords
from mars_ray.data.record_file import check_source
from mars_ray.evaluation.calibration import CalibrateOptions, calibrate, print_curve
from mars_ray.evaluation.prepare import EvaluateOptions
from mars_ray.evaluation.ray_evaluate import evaluate
from mars_ray.evaluation.tasks import TaskOptions
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.training.config import TrainConfig, parse_config
from mars_ray.training.ray_trainer import train
from mars_ray.training.run_folder import RunFolder
from pipelines.own_answers import own_answers
from pipelines.pipeline_files import agree, write
from pipelines.questions import questions, report_dropped

MAX_TOKENS = 256
DECAY = 0.9
"""Weight of a mask relative to the mask before it."""
CHECKPOINT_EVERY = 50


def main() -> None:
    """Answer the prompts, then train, calibrate and evaluate; each step resumes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="model name or folder")
    parser.add_argument("--data", type=Path, required=True, help="conversations; with --own, prompts are enough")
    parser.add_argument("--heldout", type=Path, required=True, help="held-out conversations or prompts")
    parser.add_argument("--heldout-prompts", type=int, default=96, help="number of held-out prompts")
    parser.add_argument(
        "--own", type=int, default=0, help="number of prompts that the model itself answers for training"
    )
    parser.add_argument("--from", dest="start", help="adapter to start from, of the same rank and block")
    parser.add_argument("--output", type=Path, default=Path("runs/adapt"))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens per packed row")
    parser.add_argument(
        "--max-dropped", type=float, default=MAX_DROPPED, help="share of the records that may be dropped"
    )
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-rows", type=int, default=4, help="packed rows per step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    logging.disable_progress_bar()
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    free = ("output", "max_dropped", "threads")
    agree(args.output / "adapt.json", {name: value for name, value in settings.items() if name not in free})
    own = args.output / "own"
    heldout = own_conversations(args.model, args.heldout, args.heldout_prompts, own / "heldout", args.max_dropped)
    source = args.data
    if args.own:
        source = own_conversations(args.model, args.data, args.own, own / "train", args.max_dropped).conversations
    train(training(args, source, heldout.conversations))
    adapter = RunFolder(args.output).model_here()
    if not read_adapter_card(adapter).calibration:
        calibrate(resolve_model(args.model), CalibrateOptions(data=heldout.questions, max_tokens=MAX_TOKENS), adapter)
    evaluation = args.output / "evaluation"
    evaluate(
        EvaluateOptions(
            output=evaluation,
            tasks=(str(heldout.questions),),
            questions=TaskOptions(max_tokens=MAX_TOKENS),
            model=args.model,
            adapter=str(adapter),
        )
    )
    print_curve(read_adapter_card(adapter).calibration, f"{args.model} with {adapter}")
    print(f"The adapter is in {adapter}, the report in {evaluation / 'report.html'}.")


def training(args: argparse.Namespace, source: Path, heldout: Path) -> TrainConfig:
    """Return the training settings."""
    return parse_config(
        {
            "model": args.model,
            "output": args.output,
            "data": {
                "train": source,
                "heldout": heldout,
                "length": args.length,
                "overlong": "truncate",
                "max_dropped": args.max_dropped,
            },
            "objective": {
                "kind": "mars",
                "block": args.block,
                "growth": args.start is None,  # a trained adapter need not start with short blocks
                "decay": DECAY,
                "adapter": {"rank": args.rank, "init": args.start},
            },
            "optimizer": {
                "learning_rate": args.learning_rate,
                "epochs": args.epochs,
                "batch_rows": args.batch_rows,
                "micro_rows": args.batch_rows,
            },
            "compute": {"cpus_per_worker": args.threads},
            "checkpoint_every": CHECKPOINT_EVERY,
            "measure_every": CHECKPOINT_EVERY,
        },
        "the command line",
    )


@dataclass(frozen=True, slots=True)
class Own:
    """Files with the greedy answers of a model."""

    conversations: Path
    """The prompts with their answers, for training."""
    questions: Path
    """The prompts with their answers as references, for measurement."""


def own_conversations(model: str, source: Path, count: int, folder: Path, max_dropped: float) -> Own:
    """Let the model answer up to `count` prompts from `source`. Answers cut at `MAX_TOKENS` are kept.

    Raises `DataError` if more than the share `max_dropped` of the records that were read has no prompt or no answer.
    """
    prompts = folder / "prompts.jsonl"
    own = Own(folder / "conversations.jsonl", folder / "questions.jsonl")
    if not prompts.exists():
        check_source(source)
        numbered = enumerate(questions(source, count, max_dropped))
        write(prompts, (line({"id": f"{n:08d}", "messages": messages}) for n, messages in numbered))
    if not own.conversations.exists():
        rows = own_answers(model, prompts, folder / "answers", max_tokens=MAX_TOKENS, keep_cut=True)
        unanswered = DroppedRecords()
        for row in rows:
            if not row["text"].strip():
                unanswered.add("the model's answer is empty", int(row["id"]) + 1)
        report_dropped(prompts, len(rows), unanswered, max_dropped)
        # In the rows, columns other than text are stored as JSON.
        answered = [(json.loads(row["messages"]), row["text"]) for row in rows if row["text"].strip()]
        write(own.questions, (line({"messages": prompt, "reference": text}) for prompt, text in answered))
        turns = ((prompt, {"role": "assistant", "content": text}) for prompt, text in answered)
        write(own.conversations, (line({"messages": [*prompt, turn]}) for prompt, turn in turns))
    return own


def line(fields: dict[str, object]) -> str:
    """Return a line of JSON."""
    return json.dumps(fields, ensure_ascii=False)


if __name__ == "__main__":
    run_program("adapt", main, stopped="Stopped. Run the same command to continue.")
