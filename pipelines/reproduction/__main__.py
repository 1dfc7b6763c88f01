"""Reproduce the paper's claims and compare every baseline at one budget, with the spread over seeds.

    python -m pipelines.reproduction --output runs/reproduce --json benchmarks/results/reproduction.json

The AR checkpoint of the bundled model is fine-tuned on the task families by each recipe of `recipes.py`, once
for every seed, and decoded in every way (`measures.py`). The table and what follows from it for each claim of
arXiv 2604.07023 are printed, and written as Markdown beside the JSON (`report.py`).

Ray runs as many of these as there are cores. What is done is kept: stopped by Ctrl-C or a crash, the same command goes
on, and a seed may be added later.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import ray
import torch
from ray.exceptions import RayTaskError
from transformers.utils import logging

from mars_ray.data.packed import read_report
from mars_ray.data.ray_prepare import PrepareOptions, prepare
from mars_ray.data.tasks.split import Split, mixture
from mars_ray.errors import RunError
from mars_ray.measure import machine
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.progress import ProgressLine
from mars_ray.ray_cluster import cluster_cpus, connect
from mars_ray.training.run_folder import RunFolder
from pipelines.build_bundled_model import autoregressive_model, write_examples
from pipelines.own_answers import own_answers
from pipelines.pipeline_files import Json, agree, conversation, write
from pipelines.reproduction.measures import MAX_TOKENS, baselines, caches, curve, diffusion, memory, metrics
from pipelines.reproduction.recipes import BASE, DRAFT, Recipe, recipes
from pipelines.reproduction.report import markdown
from pipelines.reproduction.training import LENGTH, STATES, random_draft, train_recipe

DATA_SEED = 7
"""Seed of the examples, other than that of the base model."""
HELDOUT = 256
"""Held-out examples measured during training."""
BASELINES = ("ar", "mars-4", "mars-8", "draft-ar", "draft-mars-4", "medusa")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One piece of work, done once its result file exists."""

    result: Path
    work: Callable[[], Json]
    needs: tuple[Path, ...] = ()
    """Result files of other units that it needs."""
    alone: bool = False
    """True if no other unit may run at the same time, because its seconds are measured."""


def main() -> None:
    """Run the units that are left, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce"), help="folder of the run")
    parser.add_argument("--json", type=Path, help="file for all figures; the report is the .md file next to it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--examples", type=int, default=20_000, help="training examples")
    parser.add_argument("--per-family", type=int, default=40, help="held-out questions of each family")
    parser.add_argument("--base", help="base model; by default the AR checkpoint of the bundled model is trained")
    args = parser.parse_args()
    logging.disable_progress_bar()
    place = args.output.absolute()
    settings = {"base": args.base, "examples": args.examples, "per_family": args.per_family}
    named = resolve_model(args.base) if args.base else None
    agree(place / "settings.json", settings)
    base = (named or autoregressive_model()).absolute()
    begin(place, base, args.examples)
    seeds = {seed: place / f"seed-{seed}" for seed in args.seeds}
    units: list[Unit] = []
    for seed, folder in seeds.items():
        units += (training(place, base, folder, recipe, seed) for recipe in recipes())
        units += measures(place, base, folder, seed, args.per_family)
    do(units)
    report = {
        "command": " ".join(["python", "-m", "pipelines.reproduction", *sys.argv[1:]]),
        "settings": settings,
        "machine": machine(),
        "recipes": [asdict(recipe) for recipe in recipes()],
        "own_answers": about_own_answers(place),
        "seeds": {str(seed): results(folder) for seed, folder in seeds.items()},
    }
    text = markdown(report)
    print(text)
    if args.json:
        write(args.json, [json.dumps(report, indent=1)])
        write(args.json.with_suffix(".md"), [text])


def begin(place: Path, base: Path, examples: int) -> None:
    """Write and pack the training data: references, and the base's own answers."""
    connect()
    splits: dict[Split, int] = {"train": examples, "heldout": HELDOUT}
    for split, count in splits.items():
        source = place / f"{split}.jsonl"
        write_examples(source, islice(mixture(split, DATA_SEED), count))
        pack(base, source, place / "references" / split)
    own = place / "own.jsonl"
    if not own.exists():
        asked = place / "train.jsonl"
        answers = place / "answers"
        rows = own_answers(str(base), asked, answers, max_tokens=MAX_TOKENS, workers=cluster_cores())
        write(own, (conversation(row["prompt"], row["text"]) for row in rows))
    pack(base, own, place / "own" / "train")
    if not (place / "own" / "heldout").exists():
        (place / "own" / "heldout").symlink_to(place / "references" / "heldout")


def about_own_answers(place: Path) -> Json:
    """Return the share of own answers that equal the reference, and the CPU seconds they took."""
    references, own = (
        [json.loads(line) for line in (place / name).read_text().splitlines()] for name in ("train.jsonl", "own.jsonl")
    )
    known = {(each["prompt"], each["response"]) for each in references}
    said = [tuple(message["content"] for message in each["messages"]) for each in own]
    made = json.loads((place / "answers" / "report.json").read_text())
    return {
        "like_references": sum(each in known for each in said) / len(said),
        "cpu_s": made["seconds"] * made["workers"],
    }


def pack(base: Path, source: Path, folder: Path) -> None:
    """Tokenise and pack examples."""
    if read_report(folder) is None:
        options = PrepareOptions(length=LENGTH, overlong="drop", bad_records="error")
        with ProgressLine(f"tokenise {source.name}", total=None) as progress:
            prepare(source, folder, base, options, progress)


def training(place: Path, base: Path, folder: Path, recipe: Recipe, seed: int) -> Unit:
    """Return the unit that trains a recipe. Raises `ConfigError` if its folder belongs to another recipe."""
    agree(folder / recipe.name / "recipe.json", asdict(recipe))
    starts = {BASE: base, DRAFT: folder / DRAFT}
    begins = starts.get(recipe.start, folder / recipe.start / "model")
    data = place / ("own" if recipe.own_answers else "references")

    def work() -> Json:
        if recipe.start == DRAFT and not begins.exists():
            random_draft(begins, base, seed)
        output = folder / recipe.name
        if not (output / "data").exists():
            (output / "data").symlink_to(data)
        goes_on = (output / STATES).exists() or RunFolder(output).model.exists()
        started_s = time.process_time()
        train_recipe(recipe, begins, output, seed)
        # The time of an earlier process is not known.
        return {"cpu_s": None if goes_on else time.process_time() - started_s}

    needs = () if recipe.start in starts else (folder / f"{recipe.start}.json",)
    return Unit(result=folder / f"{recipe.name}.json", work=work, needs=needs)


def measures(place: Path, base: Path, folder: Path, seed: int, per_family: int) -> Iterator[Unit]:
    """Yield the units that measure the models of a seed."""

    def unit(name: str, work: Callable[[], Json], *needs: str, alone: bool = False) -> Unit:
        return Unit(
            result=folder / f"{name}.figures.json",
            work=work,
            needs=tuple(folder / f"{need}.json" for need in needs if need != BASE),
            alone=alone,
        )

    def model(name: str) -> Path:
        return base if name == BASE else folder / name / "model"

    yield unit(BASE, partial(curve, base, per_family))
    for recipe in recipes():
        if recipe.kind == "streams":
            yield unit(recipe.name, partial(curve, model(recipe.name), per_family), recipe.name)
    yield unit("diffusion-4", partial(diffusion, model("diffusion-4"), 4, per_family), "diffusion-4")
    yield unit("metrics", partial(metrics, model("mars-8"), per_family), "mars-8")
    named = {name: model(name) for name in BASELINES}
    yield unit("baselines", partial(baselines, named, max(1, per_family // 5)), *BASELINES, alone=True)
    measured = [recipe for recipe in recipes() if recipe.name in ("ar-longer", "mars-8")]
    yield unit("memory", partial(memory, measured, base, place / "references", seed))
    yield unit("caches", partial(caches, model("mars-16"), 32), "mars-16", alone=True)


def do(units: list[Unit]) -> None:
    """Run the units without results as Ray tasks, in order. Raises `RunError` when one fails."""
    left = [unit for unit in units if not unit.result.exists()]
    cores = cluster_cores()
    coming: dict[ray.ObjectRef[None], Unit] = {}
    with ProgressLine("reproduce", total=len(units)) as progress:
        while left or coming:
            progress.update(len(units) - len(left) - len(coming), {})
            while unit := next_unit(left, list(coming.values()), cores):
                left.remove(unit)
                coming[_run.options(num_cpus=cores if unit.alone else 1).remote(unit)] = unit
            [ready], _ = ray.wait(list(coming), num_returns=1)
            unit = coming.pop(ready)
            try:
                ray.get(ready)
            except RayTaskError as error:
                reason = str(error.cause).removesuffix(".")
                raise RunError(f"{unit.result.name}: {reason}. Mend it; the same command goes on.") from error
            progress.update(len(units) - len(left) - len(coming), {"last": unit.result.name})


def next_unit(left: list[Unit], coming: list[Unit], cores: int) -> Unit | None:
    """Return the first unit whose needs are met, or None until a core is free."""
    for unit in left:
        if all(need.exists() for need in unit.needs):
            alone = unit.alone or any(each.alone for each in coming)
            return unit if len(coming) < (1 if alone else cores) else None
    return None


@ray.remote(max_retries=0)  # type: ignore[untyped-decorator]  # Ray is untyped to us
def _run(unit: Unit) -> None:
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    write(unit.result, [json.dumps(unit.work())])


def cluster_cores() -> int:
    """Return the number of units that may run at the same time."""
    return max(1, int(cluster_cpus()))


def results(folder: Path) -> Json:
    """Return all figures of a seed, and the times of its trainings."""
    found = {
        path.name.removesuffix(".figures.json"): json.loads(path.read_text()) for path in folder.glob("*.figures.json")
    }
    trained = {recipe.name: json.loads((folder / f"{recipe.name}.json").read_text()) for recipe in recipes()}
    return {"figures": found, "training": trained}


if __name__ == "__main__":
    run_program("reproduce", main, stopped="Stopped. The same command goes on.")
