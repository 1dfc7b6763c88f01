"""Train a MARS model on its own answers, and measure the effect on its lookahead.

    python -m pipelines.self_distill --output runs/self-distill --seeds 0 1 2 --json self-distill.json

A model predicts its own text more easily than text from elsewhere. For each seed:

1. take prompts from the task families (to use your own prompts, change `write_prompts`);
2. answer them one token at a time, in autoregressive mode, with `generate` (Ray Data);
3. fine-tune the model with MARS on these answers ("self") and, as a control, on the reference answers to the same
   prompts ("gold"), both from the same start with the same settings (Ray Train);
4. decode held-out prompts at threshold 0.95 with the original model ("before") and with both trained models.

Results of finished steps are kept, so the same command resumes after Ctrl-C or a crash. Finished seeds are not
repeated, so more seeds can be added later.
"""

import argparse
import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from mars_ray.data.tasks import mixture
from mars_ray.data.tasks.split import Split
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import ModelError
from mars_ray.evaluation.calibration import calibration_curve, family_prompts
from mars_ray.evaluation.metrics import mean_and_spread
from mars_ray.measure import machine
from mars_ray.model.card import read_card
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program
from mars_ray.training.config import TrainConfig, parse_config
from mars_ray.training.ray_trainer import train
from mars_ray.training.run_folder import RunFolder
from pipelines.own_answers import own_answers
from pipelines.pipeline_files import Json, agree, conversation, write

THRESHOLD = 0.95
MAX_TOKENS = 256
LENGTH = 256
"""Tokens per packed sequence; longer conversations are dropped."""
TEACHERS = ("self", "gold")
MODELS = ("before", *TEACHERS)
MEASURED_WHILE_TRAINING = 64
"""Number of held-out examples measured during training."""
FIGURES = {"tokens_per_forward": "{:.3f}", "agreement": "{:.2%}", "accuracy": "{:.2%}"}


def main() -> None:
    """Run every seed, then compare the models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/self-distill"), help="folder of the run")
    parser.add_argument("--json", type=Path, help="file for the comparison")
    parser.add_argument("--model", default="bundled", help="'bundled', or the folder or hub name of another MARS model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--prompts", type=int, default=1024, help="training prompts per seed")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--per-family", type=int, default=40, help="held-out prompts per family and seed")
    args = parser.parse_args()
    logging.disable_progress_bar()
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "json", "seeds")}
    settings["block"] = block_of(args.model)
    runs = [run_seed(args.output / f"seed-{seed}", seed, settings) for seed in dict.fromkeys(args.seeds)]
    comparison = {
        "threshold": THRESHOLD,
        "settings": settings,
        "machine": machine(),
        "models": {name: over_seeds([run["models"][name] for run in runs]) for name in MODELS},
        "gain_over_before": {name: over_seeds([gain(run, name) for run in runs]) for name in TEACHERS},
        "runs": runs,
    }
    show(comparison)
    if args.json:
        write(args.json, [json.dumps(comparison, indent=1)])


def block_of(model: str) -> int:
    """Return the block size that the model was trained with."""
    card = read_card(resolve_model(model))
    if card is None or card.block is None:
        raise ModelError(
            f"{model} was not trained with MARS, according to its mars.json. First train it with `mars-ray train`."
        )
    return card.block


def run_seed(folder: Path, seed: int, settings: Json) -> Json:
    """Run or resume one seed and return its results."""
    configs = {teacher: training(folder, teacher, seed, settings) for teacher in TEACHERS}
    agree(folder / "settings.json", settings)
    result = folder / "result.json"
    if not result.exists():
        write_prompts(folder / "prompts.jsonl", "train", seed, settings["prompts"])
        write_prompts(folder / "heldout.jsonl", "heldout", seed, MEASURED_WHILE_TRAINING)
        learnt_from = answer(folder, settings["model"])
        steps = {teacher: train(config).step for teacher, config in configs.items()}
        folders = {"before": resolve_model(settings["model"])}
        folders |= {teacher: RunFolder(config.output).model_here() for teacher, config in configs.items()}
        models = {name: measured(folders[name], seed, settings["per_family"]) for name in MODELS}
        write(result, [json.dumps({"seed": seed, "learnt_from": learnt_from, "steps": steps, "models": models})])
    results: Json = json.loads(result.read_text())
    return results


def write_prompts(path: Path, split: Split, seed: int, count: int) -> None:
    """Write examples of the task families, with ids."""
    examples = islice(mixture(split, seed), count)
    write(path, (json.dumps({"id": str(number)} | asdict(example)) for number, example in enumerate(examples)))


def answer(folder: Path, model: str) -> int:
    """Let the model answer the prompts, and write the training data of both teachers for all complete answers.

    Returns the number of complete answers.
    """
    rows = own_answers(model, folder / "prompts.jsonl", folder / "answers", max_tokens=MAX_TOKENS)
    write(folder / "self.jsonl", (conversation(row["prompt"], row["text"]) for row in rows))
    write(folder / "gold.jsonl", (conversation(row["prompt"], row["response"]) for row in rows))
    return len(rows)


def training(folder: Path, teacher: str, seed: int, settings: Json) -> TrainConfig:
    """Return the settings of a MARS fine-tuning."""
    return parse_config(
        {
            "model": settings["model"],
            "output": folder / f"trained-{teacher}",
            "data": {"train": folder / f"{teacher}.jsonl", "heldout": folder / "heldout.jsonl", "length": LENGTH},
            "objective": {"kind": "mars", "block": settings["block"], "growth": False},  # the model looks ahead already
            "optimizer": {name: settings[name] for name in ("learning_rate", "epochs")} | {"batch_rows": 8},
            "compute": {"precision": "bfloat16"},
            "checkpoint_every": 50,
            "seed": seed,
        },
        "the command line",
    )


def measured(model: Path, seed: int, per_family: int) -> Json:
    """Return the figures on held-out prompts, which are the same for all models of a seed."""
    prompts = family_prompts(per_family, range(seed, seed + 1))
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    [point] = calibration_curve(load_checkpoint(model), prompts, (THRESHOLD,), sampling, "task families, held out")
    return point.model_dump(include={*FIGURES, "examples", "tokens", "by_family"})


def gain(run: Json, name: str) -> Json:
    """Return the change of the figures on the same prompts."""
    return {figure: run["models"][name][figure] - run["models"]["before"][figure] for figure in FIGURES}


def over_seeds(figures: list[Json]) -> Json:
    """Return mean and standard deviation of each figure."""
    pairs = {figure: mean_and_spread([of_seed[figure] for of_seed in figures]) for figure in FIGURES}
    return {figure: {"mean": mean, "std": std} for figure, (mean, std) in pairs.items()}


def show(comparison: Json) -> None:
    """Print the figures of each model, and the change by each teacher."""
    runs = comparison["runs"]
    examples = sum(run["models"]["before"]["examples"] for run in runs)
    table = Table(
        title=f"Self-distillation, threshold {THRESHOLD}",
        caption=f"{len(runs)} seeds, {examples:,} held-out prompts; ± standard deviation over seeds",
    )
    for name in ("model", *FIGURES):
        table.add_column(name.replace("_", " "))
    rows = comparison["models"] | {f"{name} - before": gains for name, gains in comparison["gain_over_before"].items()}
    for name, figures in rows.items():
        table.add_row(name, *(shown(figures[figure], form) for figure, form in FIGURES.items()))
    Console().print(table)


def shown(figure: Json, form: str) -> str:
    """Return a mean with its standard deviation, if there is one."""
    spread = "" if figure["std"] is None else f" ± {form.format(figure['std'])}"
    return form.format(figure["mean"]) + spread


if __name__ == "__main__":
    run_program("self_distill", main, stopped="Stopped. Run the same command to continue.")
