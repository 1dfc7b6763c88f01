"""Make a filtered data set: sample several answers to each prompt, and keep one that a verifier accepts.

    python -m pipelines.best_of_n --output runs/best-of-n --prompts 2000 --n 4

1. take prompts from the task families (to use your own prompts, change `write_prompts`);
2. sample n answers to each prompt with `generate` (Ray Data);
3. keep the shortest correct answer to each prompt (to use your own verifier, change `is_right`);
4. report the shares of correct answers and of kept prompts, by family.

`kept.jsonl` is the input for `mars-ray train`; `kept.json` has the shares. The same command resumes after Ctrl-C or a
crash; other settings need another output folder.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.run.options import GenerateOptions
from mars_ray.data.tasks import is_right_answer, mixture
from mars_ray.engine.request import SamplingParams
from mars_ray.program import run_program
from pipelines.pipeline_files import conversation, rows_in, write

Row = dict[str, Any]


@dataclass(slots=True)
class Share:
    """Counts of prompts and answers in one family."""

    prompts: int = 0
    kept: int = 0
    """Prompts with a correct answer."""
    answers: int = 0
    right: int = 0


def main() -> None:
    """Sample, filter and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/best-of-n"), help="folder of the run")
    parser.add_argument("--model", default="bundled", help="'bundled', 'smollm2', a folder, or a name on a hub")
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--n", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and answers")
    args = parser.parse_args()
    prompts = args.output / "prompts.jsonl"
    answers = args.output / "answers"
    sampling = SamplingParams(temperature=args.temperature, n=args.n, seed=args.seed, max_tokens=256)
    write_prompts(prompts, args.seed, args.prompts)
    generate_files(
        GenerateOptions(
            input=(str(prompts),),
            output=answers,
            model=args.model,
            sampling=sampling,
        )
    )
    shares: dict[str, Share] = {}
    write(args.output / "kept.jsonl", (conversation(row["prompt"], row["text"]) for row in kept(answers, shares)))
    write(args.output / "kept.json", [json.dumps({name: asdict(share) for name, share in sorted(shares.items())})])
    show(shares)


def write_prompts(path: Path, seed: int, count: int) -> None:
    """Write prompts with the columns for the verifier, which `generate` copies to its rows."""
    examples = islice(mixture("train", seed), count)
    write(
        path,
        (
            json.dumps({"id": str(n), "family": example.family, "prompt": example.prompt, "answer": example.answer})
            for n, example in enumerate(examples)
        ),
    )


def kept(job: Path, shares: dict[str, Share]) -> Iterator[Row]:
    """Yield the shortest correct answer to each prompt, and add the counts to `shares`."""
    # The answers to a prompt are consecutive rows of the shards.
    for _, rows in groupby(rows_in(job), key=itemgetter("id")):
        answers = list(rows)
        right = [row for row in answers if is_right(row)]
        share = shares.setdefault(answers[0]["family"], Share())
        share.prompts += 1
        share.kept += bool(right)
        share.answers += len(answers)
        share.right += len(right)
        if right:
            yield min(right, key=itemgetter("tokens"))


def is_right(row: Row) -> bool:
    """Return whether an answer is complete and correct."""
    return row["finish_reason"] == "stop" and is_right_answer(row["family"], row["answer"], row["text"])


def show(shares: dict[str, Share]) -> None:
    """Print the shares by family and in total."""
    table = Table(title="Best of n")
    for name in ("family", "prompts", "correct answers", "kept prompts"):
        table.add_column(name, justify="left" if name == "family" else "right")
    total = Share(*(sum(column) for column in zip(*(asdict(share).values() for share in shares.values()), strict=True)))
    for name, share in [*sorted(shares.items()), ("all", total)]:
        right = share.right / max(1, share.answers)
        kept_prompts = share.kept / max(1, share.prompts)
        table.add_row(name, f"{share.prompts:,}", f"{right:.1%}", f"{kept_prompts:.1%}")
    Console().print(table)


if __name__ == "__main__":
    run_program("best_of_n", main, stopped="Stopped. Run the same command to continue.")
