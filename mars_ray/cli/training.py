"""The commands that make a model: `mars-ray prepare`, `mars-ray train` and `mars-ray calibrate`."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from mars_ray.cli.shared import AdapterOption, AsJson, Model, print_line, show_results
from mars_ray.data.dropped_records import MAX_DROPPED


def train(
    config: Annotated[Path, typer.Option(help="YAML file of the run; see pipelines/.")], as_json: AsJson = False
) -> None:
    """Fine-tune a model with Ray Train. Running the same command again resumes a stopped run."""
    from mars_ray.training.config import read_config
    from mars_ray.training.ray_trainer import data_losses
    from mars_ray.training.ray_trainer import train as run
    from mars_ray.training.run_folder import RunFolder

    settings = read_config(config)
    results = asdict(run(settings)) | {"model": str(RunFolder(settings.output).model)}
    results |= {f"data {name}": line for name, line in data_losses(settings).items()}
    show_results("trained", results, as_json)


def prepare(
    input_file: Annotated[
        str, typer.Option("--input", help="JSONL (plain, gz, zst) or parquet of conversations; a path or URL.")
    ],
    output: Annotated[Path, typer.Option(help="Folder for the packed rows.")],
    model: Model = "bundled",
    length: Annotated[int, typer.Option(min=8, help="Tokens per packed row.")] = 512,
    overlong: Annotated[Literal["drop", "truncate"], typer.Option(help="Treatment of longer examples.")] = "drop",
    max_dropped: Annotated[
        float,
        typer.Option(min=0, max=1, help="Maximum share of the records that may be dropped: unusable or too long."),
    ] = MAX_DROPPED,
    as_json: AsJson = False,
) -> None:
    """Tokenise and pack training data, and report the counts. `train` does the same before it trains."""
    from mars_ray.data.ray_prepare import PrepareOptions
    from mars_ray.data.ray_prepare import prepare as run
    from mars_ray.model.resolve import resolve_model
    from mars_ray.progress import ProgressLine
    from mars_ray.ray_cluster import connect
    from mars_ray.storage.location import locate

    options = PrepareOptions(length=length, overlong=overlong, max_dropped=max_dropped)
    folder = resolve_model(model).absolute()
    connect()
    source = locate(input_file)
    with ProgressLine(f"tokenise {source.name}", total=None) as progress:
        report = run(source, output, folder, options, progress)
    show_results("prepared", asdict(report), as_json)
    if line := report.losses(source.name):
        print_line(line)


def calibrate(
    model: Model = "bundled",
    adapter: AdapterOption = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="JSONL or parquet with 'prompt' or 'messages', or its URL. Default: the built-in task families."
        ),
    ] = None,
    examples: Annotated[
        int | None, typer.Option(help="Examples per seed. Default: 100 of each family, or all of --data.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(help="Number of samples from which the spread is computed (3); --data is split into this many."),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Maximum number of tokens per answer (256).")] = None,
    results: Annotated[
        str | None,
        typer.Option(help="Output folder of `mars-ray evaluate`, whose results become the calibration; or its URL."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure speed, agreement and accuracy at each threshold, and write them into the model card, mars.json."""
    from mars_ray.adapter.card import resolve_adapter
    from mars_ray.errors import ConfigError
    from mars_ray.evaluation.calibration import CalibrateOptions, print_curve
    from mars_ray.evaluation.calibration import calibrate as run
    from mars_ray.evaluation.calibration_from_results import calibrate_from
    from mars_ray.model.resolve import resolve_model
    from mars_ray.storage.location import locate

    if results is not None and (data, examples, seeds, max_tokens) != (None,) * 4:
        raise ConfigError(
            "give either --results, which are measured already, or --data, --examples, --seeds and --max-tokens."
        )
    location = None if data is None else locate(data)
    usual = CalibrateOptions()
    options = CalibrateOptions(
        data=location,
        examples=examples,
        seeds=usual.seeds if seeds is None else seeds,
        max_tokens=usual.max_tokens if max_tokens is None else max_tokens,
    )
    folder = resolve_model(model)
    adapter_folder = resolve_adapter(adapter)
    if results is None:
        curve = run(folder, options, adapter_folder)
    else:
        curve = calibrate_from(locate(results), folder, adapter_folder)
    calibrated = adapter_folder or folder
    print_curve(curve, f"calibrated {calibrated}")
    if as_json:
        print(json.dumps({"model": str(calibrated), "calibration": [point.model_dump() for point in curve]}))
