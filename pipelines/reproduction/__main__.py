"""Reproduce the claims of the paper and compare all baselines at one budget, with the spread over seeds.

    python -m pipelines.reproduction --output runs/reproduce --json benchmarks/results/reproduction.json

The AR checkpoint of the bundled model is fine-tuned on the task families with each recipe in `recipes.py`, once per
seed, and decoded with each decoder (`measures.py`). The tables and the verdict on each claim of arXiv 2604.07023 are
printed, and written as Markdown next to the JSON (`report.py`).

Ray runs one unit of work per core. Finished units are kept, so the same command resumes after Ctrl-C or a crash, and
seeds can be added later.
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
from mars_ray.ray_cluster import connect
from mars_ray.training.run_folder import RunFolder
from pipelines.build_bundled_model import autoregressive_model, write_examples
from pipelines.own_answers import own_answers
from pipelines.pipeline_files import Json, agree, conversation, write
from pipelines.reproduction.measures import MAX_TOKENS, baselines, caches, curve, diffusion, memory, metrics
from pipelines.reproduction.recipes import BASE, DRAFT, Recipe, recipes
from pipelines.reproduction.report import markdown
from pipelines.reproduction.training import LENGTH, STATES, random_draft, train_recipe

DATA_SEED = 7
"""Seed of the examples, which differs from the seed of the base model's examples."""
HELDOUT = 256
"""Number of held-out examples measured during training."""
BASELINES = ("ar", "mars-4", "mars-8", "draft-ar", "draft-mars-4", "medusa")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A piece of work, which is done once its result file exists."""

    result: Path
    work: Callable[[], Json]
    needs: tuple[Path, ...] = ()
    """Result files of the units that must run before."""
    alone: bool = False
    """True if no other unit may run at the same time, because this unit measures time."""


def main() -> None:
    """Run the unfinished units, and compare all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/reproduce"), help="folder of the run")
    parser.add_argument("--json", type=Path, help="file for all figures; the report is the .md file next to it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--examples", type=int, default=20_000, help="training examples")
    parser.add_argument("--per-family", type=int, default=40, help="held-out questions per family")
    parser.add_argument("--base", help="base model; by default the AR checkpoint of the bundled model is trained")
    args = parser.parse_args()
    logging.disable_progress_bar()
    output = args.output.absolute()
    settings = {"base": args.base, "examples": args.examples, "per_family": args.per_family}
    # Resolved first, so that a wrong name fails at once.
    base = resolve_model(args.base).absolute() if args.base else None
    agree(output / "settings.json", settings)
    base = base or autoregressive_model().absolute()
    begin(output, base, args.examples)
    seeds = {seed: output / f"seed-{seed}" for seed in args.seeds}
    units: list[Unit] = []
    for seed, folder in seeds.items():
        units += (training(output, base, folder, recipe, seed) for recipe in recipes())
        units += measures(output, base, folder, seed, args.per_family)
    run_units(units)
    report = {
        "command": " ".join(["python", "-m", "pipelines.reproduction", *sys.argv[1:]]),
        "settings": settings,
        "machine": machine(),
        "recipes": [asdict(recipe) for recipe in recipes()],
        "own_answers": about_own_answers(output),
        "seeds": {str(seed): results(folder) for seed, folder in seeds.items()},
    }
    text = markdown(report)
    print(text)
    if args.json:
        write(args.json, [json.dumps(report, indent=1)])
        write(args.json.with_suffix(".md"), [text])


def begin(output: Path, base: Path, examples: int) -> None:
    """Write and pack the training data: references, and the base model's own answers."""
    connect()
    splits: dict[Split, int] = {"train": examples, "heldout": HELDOUT}
    for split, count in splits.items():
        source = output / f"{split}.jsonl"
        write_examples(source, islice(mixture(split, DATA_SEED), count))
        pack(base, source, output / "references" / split)
    own = output / "own.jsonl"
    if not own.exists():
        prompts = output / "train.jsonl"
        rows = own_answers(str(base), prompts, output / "answers", max_tokens=MAX_TOKENS, workers=cluster_cores())
        write(own, (conversation(row["prompt"], row["text"]) for row in rows))
    pack(base, own, output / "own" / "train")
    if not (output / "own" / "heldout").exists():
        (output / "own" / "heldout").symlink_to(output / "references" / "heldout")


def about_own_answers(output: Path) -> Json:
    """Return the share of own answers that equal the reference, and the CPU seconds of all own answers."""
    references, own = (
        [json.loads(line) for line in (output / name).read_text().splitlines()] for name in ("train.jsonl", "own.jsonl")
    )
    reference_pairs = {(record["prompt"], record["response"]) for record in references}
    own_pairs = [tuple(message["content"] for message in record["messages"]) for record in own]
    report = json.loads((output / "answers" / "report.json").read_text())
    return {
        "like_references": sum(pair in reference_pairs for pair in own_pairs) / len(own_pairs),
        "cpu_s": report["seconds"] * report["workers"],
    }


def pack(base: Path, source: Path, folder: Path) -> None:
    """Tokenise and pack the examples in `source`, unless `folder` is complete."""
    if read_report(folder) is None:
        options = PrepareOptions(length=LENGTH, overlong="drop")
        with ProgressLine(f"tokenise {source.name}", total=None) as progress:
            prepare(source, folder, base, options, progress)


def training(output: Path, base: Path, folder: Path, recipe: Recipe, seed: int) -> Unit:
    """Return the unit that trains a recipe. Raises `ConfigError` if its folder belongs to another recipe."""
    agree(folder / recipe.name / "recipe.json", asdict(recipe))
    starts = {BASE: base, DRAFT: folder / DRAFT}
    start = starts.get(recipe.start, folder / recipe.start / "model")
    data = output / ("own" if recipe.own_answers else "references")

    def work() -> Json:
        if recipe.start == DRAFT and not start.exists():
            random_draft(start, base, seed)
        run = folder / recipe.name
        if not (run / "data").exists():
            (run / "data").symlink_to(data)
        resumed = (run / STATES).exists() or RunFolder(run).model.exists()
        started_s = time.process_time()
        train_recipe(recipe, start, run, seed)
        # The CPU seconds of an interrupted process are unknown.
        return {"cpu_s": None if resumed else time.process_time() - started_s}

    needs = () if recipe.start in starts else (folder / f"{recipe.start}.json",)
    return Unit(result=folder / f"{recipe.name}.json", work=work, needs=needs)


def measures(output: Path, base: Path, folder: Path, seed: int, per_family: int) -> Iterator[Unit]:
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
    models = {name: model(name) for name in BASELINES}
    yield unit("baselines", partial(baselines, models, max(1, per_family // 5)), *BASELINES, alone=True)
    measured = [recipe for recipe in recipes() if recipe.name in ("ar-longer", "mars-8")]
    yield unit("memory", partial(memory, measured, base, output / "references", seed))
    yield unit("caches", partial(caches, model("mars-16"), 32), "mars-16", alone=True)


def run_units(units: list[Unit]) -> None:
    """Run the units that have no results as Ray tasks, in order. Raises `RunError` if a unit fails."""
    pending = [unit for unit in units if not unit.result.exists()]
    cores = cluster_cores()
    running: dict[ray.ObjectRef[None], Unit] = {}
    with ProgressLine("reproduce", total=len(units)) as progress:
        while pending or running:
            progress.update(len(units) - len(pending) - len(running), {})
            while unit := next_unit(pending, list(running.values()), cores):
                pending.remove(unit)
                running[_run.remote(unit)] = unit
            [ready], _ = ray.wait(list(running), num_returns=1)
            unit = running.pop(ready)
            try:
                ray.get(ready)
            except RayTaskError as error:
                reason = str(error.cause).removesuffix(".")
                raise RunError(
                    f"{unit.result.name}: {reason}. Fix the cause and run the same command to continue."
                ) from error
            progress.update(len(units) - len(pending) - len(running), {"last": unit.result.name})


def next_unit(pending: list[Unit], running: list[Unit], cores: int) -> Unit | None:
    """Return the first unit that can run, or None if none can run yet or no core is free."""
    for unit in pending:
        if all(need.exists() for need in unit.needs):
            alone = unit.alone or any(other.alone for other in running)
            return unit if len(running) < (1 if alone else cores) else None
    return None


@ray.remote(max_retries=0, num_cpus=1)  # type: ignore[untyped-decorator]  # Ray is untyped to us
def _run(unit: Unit) -> None:
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    write(unit.result, [json.dumps(unit.work())])


def cluster_cores() -> int:
    """Return the number of CPUs in the cluster, at least 1."""
    return max(1, int(ray.cluster_resources().get("CPU", 0)))


def results(folder: Path) -> Json:
    """Return all figures of a seed, and the CPU seconds of its trainings."""
    measured = {
        path.name.removesuffix(".figures.json"): json.loads(path.read_text()) for path in folder.glob("*.figures.json")
    }
    trained = {recipe.name: json.loads((folder / f"{recipe.name}.json").read_text()) for recipe in recipes()}
    return {"figures": measured, "training": trained}


if __name__ == "__main__":
    run_program("reproduce", main, stopped="Stopped. Run the same command to continue.")
