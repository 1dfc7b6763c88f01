"""Any model learns to look ahead, and stays itself: an adapter, from conversations or from its own answers.

    python pipelines/adapt.py --model smollm2 --data train.jsonl.gz --heldout val.jsonl.gz --own 2000

1. With `--own`, prompts of the data are answered by the model itself, one token at a time, with `generate` (Ray Data).
   Text that the model would write is what it will have to foresee; without, the answers in the data are learnt from.
2. The conversations are packed.
3. An adapter is trained on them (`mars_ray.adapter`), in this process; the model itself is its teacher at every mask.

What a step has made is kept: stopped by Ctrl-C, a kill or a reboot, the same command goes on. In the output folder
`model` is the adapter, `adapters` what it was after so many steps, `metrics.jsonl` the figures of each step.
"""

import argparse
import json
import signal
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from own_answers import own_answers
from pipeline_files import Json, agree, write

from mars_ray.data.chat import ChatEncoder, Encoded
from mars_ray.data.packed import PackedWriter, PackReport, read_report
from mars_ray.data.packing import Packer
from mars_ray.data.record_file import read_records
from mars_ray.data.records import Record, parse_record
from mars_ray.errors import InterruptedRunError
from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import resolve_model
from mars_ray.model.tokenizer import load_tokenizer
from mars_ray.program import run_program
from mars_ray.training.config import TrainConfig, parse_config
from mars_ray.training.local_store import LocalStore
from mars_ray.training.loop import TrainingRun
from mars_ray.training.run_folder import RunFolder

RECORDS_AT_ONCE = 1024
HELDOUT_PROMPTS = 64
MAX_TOKENS = 256


def main() -> None:
    """Answer, pack, train; each from where it stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what `mars-ray train` takes")
    parser.add_argument("--data", type=Path, required=True, help="conversations, or prompts with --own")
    parser.add_argument("--heldout", type=Path, required=True, help="conversations that are measured while training")
    parser.add_argument("--own", type=int, default=0, help="prompts to answer with the model itself")
    parser.add_argument("--output", type=Path, default=Path("runs/adapt"))
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--block", type=int, default=8)
    parser.add_argument("--decay", type=float, default=0.9)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-rows", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--checkpoint-every", type=int, default=50, help="steps")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settings = {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(given).items()
        if name not in ("output", "threads")
    }
    agree(given.output / "adapt.json", settings)
    config, folder = training(given), RunFolder(given.output)
    with folder.only_driver():
        for source, packed, count in (
            (given.heldout, folder.heldout_data, HELDOUT_PROMPTS),
            (given.data, folder.train_data, given.own),
        ):
            if read_report(packed) is None:
                if given.own:
                    source = answered(given.model, source, packed.with_name(f"{packed.name}-own"), count)
                pack(source, packed, config)
        if not folder.model.exists():
            folder.begin_attempt()
            precision = "bf16" if given.precision == "bfloat16" else "no"
            accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision=precision)
            signal.signal(signal.SIGINT, lambda *_: folder.ask_to_stop())
            state = TrainingRun(config, accelerator, LocalStore(given.output / "states")).run()
            if not folder.model.exists():
                raise InterruptedRunError(f"Stopped after {state.steps} steps, saved. The same command goes on.")
    print(f"The adapter is in {folder.model}.")


def training(given: argparse.Namespace) -> TrainConfig:
    """Return the settings of the training."""
    return parse_config(
        {
            "model": given.model,
            "output": given.output,
            "data": {"train": given.data, "heldout": given.heldout, "length": given.length, "overlong": "truncate"},
            "objective": {
                "kind": "mars",
                "block": given.block,
                "decay": given.decay,
                "adapter": {"rank": given.rank},
            },
            "optimizer": {
                "learning_rate": given.learning_rate,
                "epochs": given.epochs,
                "batch_rows": given.batch_rows,
                "micro_rows": given.batch_rows,
            },
            "compute": {"precision": given.precision},
            "checkpoint_every": given.checkpoint_every,
            "measure_every": given.checkpoint_every,
        },
        "the command line",
    )


def answered(model: str, source: Path, folder: Path, count: int) -> Path:
    """Let the model answer the first `count` prompts of `source`; return the file of the conversations."""
    prompts, result = folder / "prompts.jsonl", folder / "conversations.jsonl"
    if not prompts.exists():
        write(prompts, (json.dumps(prompt(n, each)) for n, each in enumerate(islice(records(source), count))))
    if not result.exists():
        rows = own_answers(model, prompts, folder / "answers", max_tokens=MAX_TOKENS)
        write(result, map(answered_conversation, rows))
    return result


def prompt(number: int, record: Record) -> Json:
    """Return what was said before the first answer, with an id."""
    first = next(n for n, message in enumerate(record.messages) if message["role"] == "assistant")
    return {"id": f"{number:08d}", "messages": list(record.messages[:first])}


def answered_conversation(row: Json) -> str:
    """Return the line of what was asked and what the model said; columns that are no text stand as JSON in rows."""
    messages = [*json.loads(row["messages"]), {"role": "assistant", "content": row["text"]}]
    return json.dumps({"messages": messages}, ensure_ascii=False)


def records(source: Path) -> Iterator[Record]:
    """Read conversations."""
    return (parse_record(raw) for chunk in read_records(source, RECORDS_AT_ONCE) for raw in chunk)


def pack(source: Path, folder: Path, config: TrainConfig) -> None:
    """Tokenise conversations and write packed rows."""
    found = check_folder(resolve_model(config.model))
    encoder = ChatEncoder(load_tokenizer(found.path, found.config, found.tokenizer_is_custom))
    packer, left, read, bad, started = Packer(config.data.length, "truncate"), records(source), 0, 0, time.monotonic()
    with PackedWriter(folder, config.data.length) as writer:
        while some := list(islice(left, RECORDS_AT_ONCE)):
            for each in encoder.encode(some):
                if isinstance(each, Encoded):
                    writer.write(packer.add(each))
                else:
                    bad += 1
            read += len(some)
        writer.write(packer.finish())
        seconds = time.monotonic() - started
        writer.close(
            PackReport(
                records=read,
                bad_records=bad,
                dropped_overlong=packer.dropped,
                truncated=packer.truncated,
                examples=packer.examples,
                tokens=packer.tokens,
                response_tokens=packer.response_tokens,
                rows=writer.rows,
                length=config.data.length,
                fill=packer.tokens / (writer.rows * config.data.length),
                seconds=seconds,
                tokens_per_s=packer.tokens / seconds,
            )
        )


if __name__ == "__main__":
    run_program("adapt", main, stopped="Stopped. The same command goes on.")
