"""The command `mars-ray demo`, which compares and races three decoding settings."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from mars_ray.cli.shared import MODEL_HELP, AdapterOption, AsJson, QuantizeOption
from mars_ray.errors import ConfigError


def demo(
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for the rows of the job; those of an earlier demo are replaced. Default: out/demo."),
    ] = None,
    model: Annotated[str | None, typer.Option(help=f"Run only races, with this model: {MODEL_HELP}")] = None,
    adapter: AdapterOption = None,
    quantize: QuantizeOption = None,
    as_json: AsJson = False,
) -> None:
    """Compare the modes ar, exact and threshold on this machine, and race them on a few prompts.

    Without --model, the bundled model answers 260 prompts at each setting, which takes a minute.
    """
    from mars_ray.adapter.card import shipped_adapters
    from mars_ray.demo.race import PROMPTS, RacePrompt, Track
    from mars_ray.demo.show import show_races

    console = Console()
    results: dict[str, Any] = {}
    prompts: list[RacePrompt] = list(PROMPTS)
    threshold = None
    if model is not None and output is not None:
        raise ConfigError("--output has no effect with --model, because races keep no rows. Leave one of them out.")
    if model is None:
        if adapter is not None or quantize is not None:
            name = "adapter" if adapter is not None else "quantize"
            raise ConfigError(
                f"--{name} has no effect without --model, because the demo then compares settings of the bundled "
                f"model. Name the model, or leave --{name} out."
            )
        from mars_ray.demo import ray_job

        output = output or Path("out/demo")
        report, settings = ray_job.compare_settings(output)
        ray_job.show_comparison(report, settings, console)
        console.print(f"All rows: {output / 'answers'}\n", highlight=False)
        results["report"] = asdict(replace(report, pace=(), samples=()))
        results["rows"] = [asdict(setting) for setting in settings]
        model = "bundled"
        prompts = ray_job.raced_prompts()
        threshold = ray_job.THRESHOLD
    elif adapter is None and model in shipped_adapters():
        adapter = model
    with Track(model, adapter, quantize=quantize, threshold=threshold) as track:
        races = show_races(map(track.race, prompts), track.label, console)
    if as_json:
        print(json.dumps(results | {"track": track.label, "races": [asdict(race) for race in races]}))
