"""The command `mars-ray generate`, which answers every row of a data set."""

import json
import shlex
import sys
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from mars_ray.cli.control import seconds_of
from mars_ray.cli.shared import (
    WITH_ERRORS,
    AdapterOption,
    AsJson,
    EngineOption,
    Model,
    Rehearse,
    TemperatureOrModel,
    TensorParallelSize,
    VllmArg,
    read_text,
    vllm_options,
    with_options,
    worker_options,
)
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.errors import ConfigError, InterruptedRunError, RunError

if TYPE_CHECKING:
    from mars_ray.batch.output.report import JobReport
    from mars_ray.batch.run.options import GenerateOptions, WorkerOptions

Input = Annotated[
    list[str],
    typer.Option("--input", help="File, folder, glob or URL: JSONL (plain, gz, zst), parquet or OpenAI batch files."),
]
Output = Annotated[str, typer.Option(help="Output folder, or its URL. The same command resumes the job in it.")]
Template = Annotated[
    str | None, typer.Option(help="Jinja template that builds the prompt from the columns of a row, or a file with it.")
]
PromptColumn = Annotated[str | None, typer.Option(help="Column with the prompt. Default: 'messages', then 'prompt'.")]
Threshold = Annotated[
    float | None,
    typer.Option(
        help="What a token ahead must reach to be kept. Default: 1, which keeps only the model's own choices."
    ),
]
Deadline = Annotated[
    str | None,
    typer.Option(help="Time limit such as 90s, 10m, 2h. Lowers the threshold just enough to finish in time."),
]
MaxQualityLoss = Annotated[
    float | None,
    typer.Option(
        help="Largest accepted loss of accuracy, by calibration. Without --deadline: go as fast as this allows."
    ),
]
DecodingMode = Annotated[
    Mode,
    typer.Option(help="'ar' decodes one token at a time. 'exact' gives the same tokens, faster."),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Sampling seed. Below threshold 1 it also makes answers independent of the load."),
]
MaxTokens = Annotated[int | None, typer.Option(help="Maximum number of tokens per answer. Default: 256.")]
Logprobs = Annotated[int | None, typer.Option(help="Write logprobs, with the N most likely tokens at each position.")]
PromptLogprobs = Annotated[
    int | None,
    typer.Option(
        help="Write prompt_logprobs, the logprobs of the prompt's tokens. --max-tokens 0 only scores prompts."
    ),
]
Trace = Annotated[
    bool,
    typer.Option("--trace", help="Write the columns token_ids and accepted, the number of tokens from each forward."),
]
Schema = Annotated[Path | None, typer.Option(help="File with a JSON Schema that constrains every answer.")]
Regex = Annotated[str | None, typer.Option(help="Regular expression that constrains every answer.")]
FileFormat = Annotated[Literal["parquet", "jsonl"], typer.Option("--format", help="Output format.")]
Limit = Annotated[int | None, typer.Option(help="Answer only the first N rows.")]
DryRun = Annotated[int | None, typer.Option(help="Print the answers to the first N rows and write nothing.")]
New = Annotated[bool, typer.Option("--new", help="Rename an earlier job in --output and start a new one.")]
RetryErrors = Annotated[bool, typer.Option("--retry-errors", help="Answer the rows with errors again.")]

REASONS = 3
"""Maximum number of error reasons shown at the end, the most frequent first."""


@with_options(workers=worker_options)
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
    max_tokens: MaxTokens = None,
    n: Annotated[int | None, typer.Option(help="Answers per row. Default: 1.")] = None,
    logprobs: Logprobs = None,
    prompt_logprobs: PromptLogprobs = None,
    trace: Trace = False,
    schema: Schema = None,
    regex: Regex = None,
    file_format: FileFormat = "parquet",
    limit: Limit = None,
    dry_run: DryRun = None,
    new: New = False,
    retry_errors: RetryErrors = False,
    rehearse: Rehearse = None,
    engine: EngineOption = None,
    tensor_parallel_size: TensorParallelSize = None,
    vllm_arg: VllmArg = None,
    as_json: AsJson = False,
    *,
    workers: "WorkerOptions",
) -> None:
    """Answer every row of a data set with Ray Data.

    Exit codes: 0 complete, 3 complete with errors, 2 wrong input, 1 failed, 130 stopped by Ctrl-C, 143 stopped by
    SIGTERM. After exit code 1, 130 or 143, running the same command again, without --new, resumes the job.
    """
    from mars_ray.batch.run.options import GenerateOptions
    from mars_ray.engine.request import DecodeParams, SamplingParams
    from mars_ray.storage.location import locate

    parameters = {
        "temperature": temperature,
        "seed": seed,
        "max_tokens": max_tokens,
        "n": n,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "grammar": _grammar(schema, regex),
    }
    set_parameters: dict[str, Any] = {name: value for name, value in parameters.items() if value is not None}
    options = GenerateOptions(
        input=tuple(sources),
        output=locate(output),
        model=model,
        adapter=adapter,
        sampling=SamplingParams(**set_parameters) if set_parameters else None,
        sampling_of_model=temperature is None,
        decode=DecodeParams(mode=mode, threshold=threshold),
        workers=replace(workers, rehearse=rehearse, engine=engine, **vllm_options(tensor_parallel_size, vllm_arg)),
        template=_template(template),
        prompt_column=prompt_column,
        trace=trace,
        format=file_format,
        limit=limit,
        new=new,
        retry_errors=retry_errors,
        deadline_s=None if deadline is None else seconds_of(deadline, "--deadline"),
        max_quality_loss=max_quality_loss,
    )
    _run(options, dry_run, as_json)


def _run(options: "GenerateOptions", dry_run: int | None, as_json: bool) -> None:
    from mars_ray.batch.ray.generate_files import generate_files

    if dry_run is not None:
        if dry_run < 1:
            raise ConfigError(f"--dry-run is {dry_run}, must be at least 1.")
        if options.new or options.retry_errors or as_json:
            name = "--new" if options.new else "--retry-errors" if options.retry_errors else "--json"
            raise ConfigError(f"{name} has no effect with --dry-run, which keeps nothing. Leave one of them out.")
        _dry_run(replace(options, limit=min(dry_run, options.limit or dry_run), format="jsonl"))
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
        return GrammarSpec(kind="json_schema", text=read_text(schema))
    return None if regex is None else GrammarSpec(kind="regex", text=regex)


def _template(value: str | None) -> str | None:
    """Return the template: the option itself, or the contents of the file it names."""
    if value is None or "{{" in value or "{%" in value:
        return value
    return read_text(Path(value))


def _dry_run(options: "GenerateOptions") -> None:
    from mars_ray.batch.ray.generate_files import generate_files, show_notes
    from mars_ray.batch.run.input_files import find_input

    job_input = find_input(options.input, options.output)
    show_notes(job_input.notes)
    files = tuple(str(file.path) for file in job_input.files)
    with TemporaryDirectory() as temporary:
        output = Path(temporary) / "dry-run"
        try:
            report = generate_files(replace(options, input=files, output=output))
        except InterruptedRunError:
            raise InterruptedRunError("Stopped. Nothing was written.") from None
        except RunError as error:
            raise RunError(f"{str(error).partition(' Finished rows are kept')[0]} Nothing was written.") from error
        for path in sorted([*output.glob("rows/part-*"), *output.glob("errors.jsonl")], reverse=True):
            print(path.read_text(encoding="utf-8"), end="")
    Console(stderr=True).print(
        f"{report.rows} rows, {report.errors} errors, {report.tokens / max(1, report.rows):.0f} tokens per row, "
        f"{report.tokens_per_forward:.2f} tokens per forward. Nothing was written.",
        highlight=False,
    )
    if report.errors:
        raise typer.Exit(WITH_ERRORS)


def _show(report: "JobReport") -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{report.status}: {report.rows:,} of {report.total:,} rows, {report.errors:,} errors, "
        f"{report.tokens:,} tokens, {report.tokens_per_s:,.0f} tokens/s, "
        f"{report.tokens_per_forward:.2f} tokens per forward, {report.seconds:,.0f} s in {report.runs} runs",
        markup=False,
    )
    if report.cut:
        console.print(f"{report.cut:,} answers end at the length limit (--max-tokens)", markup=False)
    if report.deadline:
        console.print(report.deadline, markup=False)
    if report.notice:
        console.print(report.notice, markup=False)
    console.print(f"rows: {report.output}/rows   report: {report.output}/report.html", markup=False)
    if report.errors:
        command = shlex.join(["mars-ray", *(argument for argument in sys.argv[1:] if argument != "--new")])
        retry = "" if "--retry-errors" in sys.argv else " --retry-errors"
        for reason, count in list(report.errors_by_reason.items())[:REASONS]:
            console.print(f"{count:,} x {'such as ' if count > 1 else ''}{reason}", markup=False)
        console.print(f"errors: {report.errors_file}; to answer only these rows again: {command}{retry}", markup=False)
