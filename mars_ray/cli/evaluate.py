"""The command `mars-ray evaluate`, which measures the accuracy and speed of a model at each threshold."""

import os
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mars_ray.cli.shared import WITH_ERRORS, AdapterOption, AsJson, Model, Temperature, with_options, worker_options
from mars_ray.errors import ConfigError

if TYPE_CHECKING:
    from mars_ray.batch.run.options import WorkerOptions
    from mars_ray.evaluation.results import Metrics, Results

Tasks = Annotated[
    str,
    typer.Option(help="Comma-separated task families, 'families', 'gsm8k', 'humaneval', JSONL or parquet files."),
]
Output = Annotated[str, typer.Option(help="Output folder, or its URL. The same command resumes.")]
Thresholds = Annotated[
    str | None,
    typer.Option(help="Comma-separated thresholds. Default: .99,.95,.9,.8,.6; with an adapter .5,.3,.1,.05,.02."),
]
Block = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens proposed per forward. Default: the block that the model was trained with."),
]
Modes = Annotated[str, typer.Option(help="Comma-separated modes; 'ar', the baseline, is always added.")]
Seeds = Annotated[int, typer.Option(help="Number of samples per task, from which the spread is computed.")]
Examples = Annotated[
    int | None, typer.Option(help="Examples per task and seed. Default: 100 of a family, or all of a file.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(help="Maximum number of tokens per answer. Default: 512 for gsm8k and humaneval, otherwise 256."),
]
Match = Annotated[
    str, typer.Option(help="Comparison of answers with the 'reference' in a file: 'exact', 'regex' or 'json'.")
]
Data = Annotated[str | None, typer.Option(help="Folder, or its URL, with gsm8k/ and humaneval/.")]
AllowCodeExecution = Annotated[
    bool, typer.Option("--allow-code-execution", help="Let humaneval run the model's code, in a sandbox.")
]


@with_options(workers=worker_options)
def evaluate(
    tasks: Tasks,
    output: Output,
    model: Model = "bundled",
    adapter: AdapterOption = None,
    thresholds: Thresholds = None,
    modes: Modes = "ar,exact,threshold",
    block: Block = None,
    seeds: Seeds = 3,
    examples: Examples = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    match: Match = "exact",
    data: Data = None,
    allow_code_execution: AllowCodeExecution = False,
    as_json: AsJson = False,
    *,
    workers: "WorkerOptions",
) -> None:
    """Measure accuracy, agreement and speed at each threshold, and write results.json and report.html.

    Exit codes: 0 complete, 3 complete with unanswered questions, 2 wrong input, 1 failed, 130 stopped by Ctrl-C, 143
    stopped by SIGTERM. After exit code 1, 130 or 143, running the same command again resumes the evaluation.
    """
    from mars_ray.evaluation.prepare import EvaluateOptions
    from mars_ray.evaluation.ray_evaluate import evaluate as run
    from mars_ray.evaluation.tasks import TaskOptions
    from mars_ray.storage.location import locate

    questions = TaskOptions(
        examples=examples,
        seeds=seeds,
        max_tokens=max_tokens,
        match=match,
        data=None if data is None else locate(data),
        allow_code_execution=allow_code_execution,
    )
    options = EvaluateOptions(
        output=locate(output),
        tasks=_words(tasks),
        questions=questions,
        model=model,
        adapter=adapter,
        modes=_words(modes),
        thresholds=None if thresholds is None else _numbers(thresholds),
        block=block,
        temperature=temperature,
        workers=workers,
    )
    results = run(options)
    _show(results, output)
    if as_json:
        print(results.model_dump_json())
    if any(metrics.unanswered for metrics in results.overall.values()):
        raise typer.Exit(WITH_ERRORS)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for part in text.split(",") if (word := part.strip()))


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in _words(text))
    except ValueError:
        raise ConfigError(f"--thresholds is {text!r}; give numbers separated by commas, such as 1.0,.95,.9.") from None


def _show(results: "Results", output: str) -> None:
    plan = results.plan
    table = Table(
        title=f"{escape(plan.model)}: {plan.questions:,} questions, {len(plan.tasks)} tasks, {plan.seeds} seeds",
        caption="± is the standard deviation over seeds (for tokens/s, over rounds); p: paired test against ar",
    )
    for name in ("setting", "accuracy", "against ar", "p", "tokens per forward", "tokens/s", "agreement"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    for name, metrics in results.overall.items():
        speed = results.speed.settings[name]
        table.add_row(
            name, *_cells(metrics), f"{speed.tokens_per_s:,.0f} ± {speed.tokens_per_s_std:,.0f}", _agreed(metrics)
        )
    # Without a terminal, the output has no width, so set one at which every cell fits.
    width = None if os.isatty(1) else 120
    console = Console(soft_wrap=False, width=width, highlight=False)
    console.print(table)
    unanswered = sum(metrics.unanswered for metrics in results.overall.values())
    if unanswered:
        console.print(
            f"{unanswered:,} answers are missing and count as wrong: errors*.jsonl in {output}/answers", markup=False
        )
    console.print(f"report: {output}/report.html   results: {output}/results.json", markup=False, soft_wrap=True)


def _cells(metrics: "Metrics") -> tuple[str, ...]:
    paired = metrics.against_ar
    return (
        f"{metrics.accuracy:.1%}{_spread(metrics.accuracy_std, 100, 1)}",
        "-" if paired is None else f"{100 * paired.difference:+.2f}",
        "-" if paired is None else f"{paired.p_value:.2g}",
        "-"
        if metrics.tokens_per_forward is None
        else f"{metrics.tokens_per_forward:.2f}{_spread(metrics.tokens_per_forward_std, 1, 2)}",
    )


def _agreed(metrics: "Metrics") -> str:
    return "-" if metrics.agreement is None else f"{metrics.agreement:.2%}{_spread(metrics.agreement_std, 100, 2)}"


def _spread(value: float | None, factor: float, digits: int) -> str:
    return "" if value is None else f" ± {factor * value:.{digits}f}"
