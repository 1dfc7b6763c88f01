"""Any model learns to look ahead, and stays itself: an adapter, from conversations or from its own answers.

    python -m pipelines.adapt --model smollm2 --data train.jsonl.gz --heldout val.jsonl.gz --own 2000

1. The model answers held-out prompts, one token at a time, with `generate` (Ray Data): all is measured on them. With
   `--own` it answers prompts of the data, too: text that the model would write is what it will have to foresee.
   Without, the answers in the data are learnt from.
2. An adapter is trained on the conversations (Ray Train); the model itself is its teacher at every mask. With `--from`
   it begins with one that there is: that of human text goes on with own answers, that of a base with what was
   fine-tuned from it.
3. It is calibrated: what each threshold gives is written into its card.
4. It is evaluated: an answer is right that is the model's own, word for word.

What a step has made is kept: stopped by Ctrl-C, a kill or a reboot, the same command goes on. In the output folder
`model` is the adapter, `adapters` what it was after so many steps, `metrics.jsonl` has the figures of each step, and
`evaluation` the report.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from pathlib import Path

import torch
from transformers.utils import logging

from mars_ray.adapter.card import read_adapter_card
from mars_ray.data.record_file import check_source, read_records
from mars_ray.data.records import Message, parse_messages, parse_object
from mars_ray.errors import BadRecordError
from mars_ray.evaluation.calibration.calibrate import CalibrateOptions, calibrate
from mars_ray.evaluation.calibration.curve_text import print_curve
from mars_ray.evaluation.run.options import EvaluateOptions
from mars_ray.evaluation.run.ray_evaluate import evaluate
from mars_ray.evaluation.tasks.registry import TaskOptions
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.training.config import TrainConfig, parse_config
from mars_ray.training.ray_trainer import train
from mars_ray.training.run_folder import RunFolder
from pipelines.own_answers import own_answers
from pipelines.pipeline_files import agree, write

RECORDS_AT_ONCE = 1024
MAX_TOKENS = 256
DECAY = 0.9
"""What a mask counts against the one before it."""
CHECKPOINT_EVERY = 50
THRESHOLDS = (0.95, 0.9, 0.8, 0.7, 0.5)


def main() -> None:
    """Answer, train, calibrate, evaluate; each from where it stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what `mars-ray train` takes")
    parser.add_argument("--data", type=Path, required=True, help="conversations; prompts alone will do with --own")
    parser.add_argument("--heldout", type=Path, required=True, help="the same, for what is measured")
    parser.add_argument("--heldout-prompts", type=int, default=96, help="how many of them")
    parser.add_argument("--own", type=int, default=0, help="prompts to answer with the model itself")
    parser.add_argument("--from", dest="start", help="adapter to begin with, of the same rank and block")
    parser.add_argument("--output", type=Path, default=Path("runs/adapt"))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--length", type=int, default=512, help="tokens of a packed row")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-rows", type=int, default=4, help="packed rows of a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    logging.disable_progress_bar()
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    agree(given.output / "adapt.json", {name: each for name, each in settings.items() if name != "output"})
    heldout = own_conversations(given.model, given.heldout, given.heldout_prompts, given.output / "own" / "heldout")
    learnt = given.data
    if given.own:
        learnt = own_conversations(given.model, given.data, given.own, given.output / "own" / "train").conversations
    train(training(given, learnt, heldout.conversations))
    adapter = RunFolder(given.output).model_here()
    if not read_adapter_card(adapter).calibration:
        calibrate(resolve_model(given.model), CalibrateOptions(data=heldout.questions, max_tokens=MAX_TOKENS), adapter)
    evaluation = given.output / "evaluation"
    evaluate(
        EvaluateOptions(
            output=evaluation,
            tasks=(str(heldout.questions),),
            questions=TaskOptions(max_tokens=MAX_TOKENS),
            model=given.model,
            adapter=str(adapter),
            thresholds=THRESHOLDS,
        )
    )
    print_curve(read_adapter_card(adapter).calibration, f"{given.model} with {adapter}")
    print(f"The adapter is in {adapter}, the report in {evaluation / 'report.html'}.")


def training(given: argparse.Namespace, learnt: Path, heldout: Path) -> TrainConfig:
    """Return the settings of the training."""
    return parse_config(
        {
            "model": given.model,
            "output": given.output,
            "data": {
                "train": learnt,
                "heldout": heldout,
                "length": given.length,
                "overlong": "truncate",
                "bad_records": "drop",
            },
            "objective": {
                "kind": "mars",
                "block": given.block,
                "growth": given.start is None,  # one that looks ahead already need not begin with short blocks
                "decay": DECAY,
                "adapter": {"rank": given.rank, "init": given.start},
            },
            "optimizer": {
                "learning_rate": given.learning_rate,
                "epochs": given.epochs,
                "batch_rows": given.batch_rows,
                "micro_rows": given.batch_rows,
            },
            "compute": {"cpus_per_worker": given.threads},
            "checkpoint_every": CHECKPOINT_EVERY,
            "measure_every": CHECKPOINT_EVERY,
        },
        "the command line",
    )


@dataclass(frozen=True, slots=True)
class Own:
    """Files of what a model said to some prompts, greedily."""

    conversations: Path
    """The prompts with the answers, to learn from."""
    questions: Path
    """The prompts, each with its answer as the reference."""


def own_conversations(model: str, source: Path, count: int, folder: Path) -> Own:
    """Let the model answer the first `count` prompts of `source`, or all; answers that `MAX_TOKENS` cut are kept."""
    prompts, own = folder / "prompts.jsonl", Own(folder / "conversations.jsonl", folder / "questions.jsonl")
    if not prompts.exists():
        check_source(source)
        asked = enumerate(islice(questions(source), count))
        write(prompts, (line({"id": f"{n:08d}", "messages": each}) for n, each in asked))
    if not own.conversations.exists():
        rows = own_answers(model, prompts, folder / "answers", max_tokens=MAX_TOKENS, keep_cut=True)
        # Columns that are no text stand as JSON in rows.
        said = [(json.loads(row["messages"]), row["text"]) for row in rows if row["text"].strip()]
        write(own.questions, (line({"messages": asked, "reference": text}) for asked, text in said))
        answers = ((asked, {"role": "assistant", "content": text}) for asked, text in said)
        write(own.conversations, (line({"messages": [*asked, answer]}) for asked, answer in answers))
    return own


def line(fields: dict[str, object]) -> str:
    """Return a line of JSON."""
    return json.dumps(fields, ensure_ascii=False)


def questions(source: Path) -> Iterator[Sequence[Message]]:
    """Yield what was said before the first answer, of each conversation that is whole."""
    for chunk in read_records(source, RECORDS_AT_ONCE):
        for raw in chunk:
            try:
                fields = parse_object(raw)
                messages = parse_messages(fields.get("messages") or [{"role": "user", "content": fields.get("prompt")}])
            except BadRecordError:
                continue
            asked = list(takewhile(lambda message: message["role"] != "assistant", messages))
            if asked and asked[-1]["content"].strip():
                yield asked


if __name__ == "__main__":
    run_program("adapt", main, stopped="Stopped. The same command goes on.")
