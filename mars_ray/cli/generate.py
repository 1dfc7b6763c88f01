"""The command `mars-ray generate`: answer every row of a data set."""

import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from mars_ray.cli.control import seconds_of
from mars_ray.cli.options import (
    WITH_ERRORS,
    AdapterOption,
    AsJson,
    Model,
    TemperatureOrModel,
    with_worker_options,
)
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mars_ray.batch.output.report import JobReport
    from mars_ray.batch.run.options import GenerateOptions, WorkerOptions

Input = Annotated[
    list[str],
    typer.Option("--input", help="A file, folder or glob: JSONL (plain, gz, zst), parquet, OpenAI batch files."),
]
Output = Annotated[
    str, typer.Option(help="Folder for the rows, or its URL. The same command goes on with what it holds.")
]
Template = Annotated[
    str | None, typer.Option(help="Jinja over the columns of a row, or a file of it: what the user says.")
]
PromptColumn = Annotated[str | None, typer.Option(help="By default 'messages', else 'prompt'.")]
Threshold = Annotated[
    float | None,
    typer.Option(help="Confidence a token ahead needs. At 1, the default, each is verified, as with --mode exact."),
]
Deadline = Annotated[
    str | None,
    typer.Option(help="Such as 90s, 10m, 2h: take the highest threshold, up to --threshold, that ends in time."),
]
MaxQualityLoss = Annotated[
    float | None,
    typer.Option(help="Share of right answers that may be lost, by calibration; alone: as fast as that allows."),
]
DecodingMode = Annotated[
    Mode,
    typer.Option(help="'exact' compares every token ahead with 'ar', one token at a time, and gives the same."),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Of sampling. Below threshold 1 it also gives the same rows in every run, whatever the load."),
]
MaxTokens = Annotated[int, typer.Option(help="Tokens per answer at most.")]
Logprobs = Annotated[int | None, typer.Option(help="Keep them, with so many of the most likely tokens.")]
Trace = Annotated[
    bool,
    typer.Option("--trace", help="Keep the ids of the tokens (token_ids), and how many each forward gave (accepted)."),
]
Schema = Annotated[Path | None, typer.Option(help="JSON Schema that every answer holds to.")]
Regex = Annotated[str | None, typer.Option(help="Regular expression that every answer matches.")]
FileFormat = Annotated[Literal["parquet", "jsonl"], typer.Option("--format", help="Of the output.")]
Limit = Annotated[int | None, typer.Option(help="Only the first rows.")]
DryRun = Annotated[int | None, typer.Option(help="Show what the first rows give, and write nothing.")]
New = Annotated[bool, typer.Option("--new", help="Put an earlier job in --output aside and begin again.")]
RetryErrors = Annotated[bool, typer.Option("--retry-errors", help="Do the rows with errors again.")]


REASONS = 3
"""Reasons of errors that are shown at the end, the commonest first."""


@with_worker_options
def generate(
    sources: Input,
    output: Output,
    model: Model = "bundled",
    adapter: AdapterOption = None,
    template: Template = None,
    prompt_column: PromptColumn = None,
    threshold: Threshold = None,
    deadline: Deadline = None,
    max_quality_loss: MaxQualityLoss = None,
    mode: DecodingMode = Mode.THRESHOLD,
    temperature: TemperatureOrModel = None,
    seed: Seed = None,
    max_tokens: MaxTokens = 256,
    n: Annotated[int, typer.Option(help="Answers per row.")] = 1,
    logprobs: Logprobs = None,
    trace: Trace = False,
    schema: Schema = None,
    regex: Regex = None,
    file_format: FileFormat = "parquet",
    limit: Limit = None,
    dry_run: DryRun = None,
    new: New = False,
    retry_errors: RetryErrors = False,
    as_json: AsJson = False,
    *,
    workers: "WorkerOptions",
) -> None:
    """Answer every row of a data set with Ray Data.

    Exit codes: 0 complete, 3 complete with errors, 130 stopped (by SIGTERM 143), 1 failed (the same command goes on),
    2 wrong input.
    """
    from mars_ray.batch.run.options import GenerateOptions
    from mars_ray.engine.request import DecodeParams, SamplingParams
    from mars_ray.storage.location import locate

    sampling = SamplingParams(temperature=temperature or 0.0, seed=seed, max_tokens=max_tokens, n=n, logprobs=logprobs)
    options = GenerateOptions(
        input=tuple(sources),
        output=locate(output),
        model=model,
        adapter=adapter,
        sampling=replace(sampling, grammar=_grammar(schema, regex)),
        sampling_of_model=temperature is None,
        decode=DecodeParams(mode=mode, threshold=threshold),
        workers=workers,
    )
    options = replace(options, template=_template(template), prompt_column=prompt_column, trace=trace)
    options = replace(options, format=file_format, limit=limit, new=new, retry_errors=retry_errors)
    deadline_s = None if deadline is None else seconds_of(deadline, "--deadline")
    options = replace(options, deadline_s=deadline_s, max_quality_loss=max_quality_loss)
    _run(options, dry_run, as_json)


def _run(options: "GenerateOptions", dry_run: int | None, as_json: bool) -> None:
    from mars_ray.batch.ray.generate_files import generate_files

    if dry_run is not None:
        _dry_run(replace(options, limit=dry_run, format="jsonl"))
        return
    report = generate_files(options)
    _show(report)
    if as_json:
        print(json.dumps(asdict(report)))
    if report.errors:
        raise typer.Exit(WITH_ERRORS)


def _grammar(schema: Path | None, regex: str | None) -> GrammarSpec | None:
    if schema is not None and regex is not None:
        raise ConfigError("give --schema or --regex, not both.")
    if schema is not None:
        return GrammarSpec(kind="json_schema", text=_read(schema))
    return None if regex is None else GrammarSpec(kind="regex", text=regex)


def _template(given: str | None) -> str | None:
    """Return the template: the option itself, or what stands in the file it names."""
    if given is None or "{{" in given or "{%" in given:
        return given
    return _read(Path(given))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None


def _dry_run(options: "GenerateOptions") -> None:
    from mars_ray.batch.ray.generate_files import generate_files as run

    with TemporaryDirectory() as place:
        output = Path(place) / "dry-run"
        report = run(replace(options, output=output))
        for path in sorted([*output.glob("rows/part-*"), *output.glob("errors.jsonl")], reverse=True):
            print(path.read_text(encoding="utf-8"), end="")
    say = Console(stderr=True)
    say.print(
        f"{report.rows} rows, {report.errors} errors, {report.tokens / max(1, report.rows):.0f} tokens a row, "
        f"{report.tokens_per_forward:.2f} tokens a forward. Nothing was written.",
        highlight=False,
    )


def _show(report: "JobReport") -> None:
    say = Console(soft_wrap=True, highlight=False)
    say.print(
        f"{report.status}: {report.rows:,} of {report.total:,} rows, {report.errors:,} errors, "
        f"{report.tokens:,} tokens, {report.tokens_per_s:,.0f} tokens/s, "
        f"{report.tokens_per_forward:.2f} tokens per forward, {report.seconds:,.0f} s in {report.runs} runs",
        markup=False,
    )
    if report.cut:
        say.print(f"{report.cut:,} answers end at the length limit (--max-tokens)", markup=False)
    if report.deadline:
        say.print(report.deadline, markup=False)
    say.print(f"rows: {report.output}/rows   report: {report.output}/report.html", markup=False)
    if report.errors:
        again = shlex.join(["mars-ray", *sys.argv[1:]])
        retry = "" if "--retry-errors" in sys.argv else " --retry-errors"
        for reason, count in list(report.errors_by_reason.items())[:REASONS]:
            say.print(f"{count:,} x {'such as ' if count > 1 else ''}{reason}", markup=False)
        say.print(f"errors: {report.errors_file}; once mended, do just those again: {again}{retry}", markup=False)
