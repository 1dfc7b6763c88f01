"""A filtered data set: several answers to each prompt, of which a verifier keeps a right one.

    python -m pipelines.best_of_n --output runs/best-of-n --prompts 2000 --n 4

1. take prompts of the task families (put your own into `write_prompts`);
2. sample n answers to each with `generate` (Ray Data);
3. keep of each prompt the shortest answer that is right (put your own verifier into `is_right`);
4. report for each family how many answers were right, and of how many prompts one was kept.

`kept.jsonl` is what `mars-ray train` reads; `kept.json` has the shares. Stopped by Ctrl-C or a crash, the same command
goes on; other settings need another output folder.
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
    """What was kept of one family."""

    prompts: int = 0
    kept: int = 0
    """Prompts with a right answer."""
    answers: int = 0
    right: int = 0


def main() -> None:
    """Sample, filter, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/best-of-n"), help="folder of the run")
    parser.add_argument(
        "--model", default="bundled", help="a model as everywhere: 'bundled', 'smollm2', a folder, a name on a hub"
    )
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--n", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0, help="of prompts and answers")
    given = parser.parse_args()
    prompts, answers = given.output / "prompts.jsonl", given.output / "answers"
    sampling = SamplingParams(temperature=given.temperature, n=given.n, seed=given.seed, max_tokens=256)
    write_prompts(prompts, given.seed, given.prompts)
    generate_files(
        GenerateOptions(
            input=(str(prompts),),
            output=answers,
            model=given.model,
            sampling=sampling,
        )
    )
    shares: dict[str, Share] = {}
    write(given.output / "kept.jsonl", (conversation(row["prompt"], row["text"]) for row in kept(answers, shares)))
    write(given.output / "kept.json", [json.dumps({name: asdict(share) for name, share in sorted(shares.items())})])
    show(shares)


def write_prompts(path: Path, seed: int, count: int) -> None:
    """Write prompts, each with what its verifier needs; `generate` keeps these columns beside the answers."""
    examples = islice(mixture("train", seed), count)
    write(
        path,
        (
            json.dumps({"id": str(number), "family": each.family, "prompt": each.prompt, "answer": each.answer})
            for number, each in enumerate(examples)
        ),
    )


def kept(job: Path, shares: dict[str, Share]) -> Iterator[Row]:
    """Yield the shortest right answer to each prompt that has one, counting in `shares`."""
    # The answers to a prompt stand together, in the order of the shards.
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
    """Judge one answer."""
    return row["finish_reason"] == "stop" and is_right_answer(row["family"], row["answer"], row["text"])


def show(shares: dict[str, Share]) -> None:
    """Print the shares, and those of all families together."""
    table = Table(title="Best of n")
    for name in ("family", "prompts", "answers right", "prompts kept"):
        table.add_column(name, justify="left" if name == "family" else "right")
    total = Share(*(sum(column) for column in zip(*(asdict(each).values() for each in shares.values()), strict=True)))
    for name, share in [*sorted(shares.items()), ("all", total)]:
        right, kept_of = share.right / max(1, share.answers), share.kept / max(1, share.prompts)
        table.add_row(name, f"{share.prompts:,}", f"{right:.1%}", f"{kept_of:.1%}")
    Console().print(table)


if __name__ == "__main__":
    run_program("best_of_n", main, stopped="Stopped. The same command goes on.")
