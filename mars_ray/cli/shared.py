"""Options that several commands share."""

import inspect
import json
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mars_ray.engine.options import EngineName, Quantize
from mars_ray.errors import ConfigError, DataError, OutputError
from mars_ray.model.dtype import DtypeOrAuto

if TYPE_CHECKING:
    from mars_ray.batch.run.options import WorkerOptions

MODEL_HELP = (
    "'bundled', 'smollm2', a folder, a .gguf file, a URL of either, or organisation/name on a hub, optionally with "
    "@revision."
)
Model = Annotated[str, typer.Option(help=MODEL_HELP)]
ADAPTER_HELP = (
    "Lossless adapter trained for the model: 'smollm2' or 'qwen2.5-coder-0.5b-instruct' in the package, a folder, a "
    "URL or a name on a hub."
)
AdapterOption = Annotated[str | None, typer.Option("--adapter", help=ADAPTER_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one line of JSON at the end.")]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0 means the most likely token.")]
TemperatureOrModel = Annotated[
    float | None,
    typer.Option(
        help="Sampling temperature; 0 means the most likely token. Default: from generation_config.json, or 0."
    ),
]

Workers = Annotated[
    int | None, typer.Option(help="Number of engines, one process each. Default: as many as use all CPUs efficiently.")
]
Cpus = Annotated[float | None, typer.Option(help="CPUs and threads per worker. Default: an equal share.")]
Gpus = Annotated[float, typer.Option(help="GPUs per worker.")]
Dtype = Annotated[
    DtypeOrAuto,
    typer.Option(help="Weight format. 'auto': bfloat16 for large 16-bit checkpoints if this machine is fast with it."),
]
QuantizeOption = Annotated[
    Quantize | None,
    typer.Option("--quantize", help="Round the weights to 8 or 4 bits when the engine starts (CPU only)."),
]
Rehearse = Annotated[
    str | None,
    typer.Option(help="Take the step times of another machine and network, such as h200/qwen2.5-7b or a YAML file."),
]
EngineOption = Annotated[
    EngineName | None,
    typer.Option("--engine", help="Engine that decodes. Default: vllm on a GPU where it is installed, otherwise mars."),
]
TensorParallelSize = Annotated[
    int | None, typer.Option(min=1, help="GPUs that share one copy of the model; above 1 only with vllm. Default: 1.")
]
VllmArg = Annotated[
    list[str] | None,
    typer.Option(help="Argument of vLLM, such as gpu_memory_utilization=0.8; repeat it for several."),
]

WITH_ERRORS = 3
"""Exit code of a complete job that has rows with errors."""


def with_options(**makers: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace each named parameter of a command with one command-line option per parameter of its maker.

    A maker is a class of options or a function that returns them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for part in (*makers.values(), command)
            for parameter in inspect.signature(part).parameters.values()
            if part is not command or parameter.name not in makers
        ]

        @wraps(command)
        def run(**values: Any) -> None:
            made = {
                name: make(**{field: _as_field(values.pop(field)) for field in inspect.signature(make).parameters})
                for name, make in makers.items()
            }
            command(**values, **made)

        run.__signature__ = inspect.Signature(list(map(_for_typer, parameters)))  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: _for_typer(parameter).annotation for parameter in parameters}
        return run

    return decorate


def _as_field(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _for_typer(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter for any number of texts as a list, because typer reads tuples only of a fixed length."""
    if get_args(parameter.annotation)[:1] != (tuple[str, ...],):
        return parameter
    return parameter.replace(
        annotation=Annotated[list[str], *parameter.annotation.__metadata__], default=list(parameter.default)
    )


def worker_options(
    workers: Workers = None,
    cpus: Cpus = None,
    gpus: Gpus = 0.0,
    dtype: Dtype = "auto",
    quantize: QuantizeOption = None,
) -> "WorkerOptions":
    """Return the options of workers that commands have."""
    from mars_ray.batch.run.options import WorkerOptions

    return WorkerOptions(count=workers, cpus=cpus, gpus=gpus, dtype=dtype, quantize=quantize)


def vllm_options(tensor_parallel_size: int | None, vllm_arg: list[str] | None) -> dict[str, Any]:
    """Return the options of vLLM that are set, as fields of `EngineTuning`.

    The VALUE of an option `--vllm-arg NAME=VALUE` is read as JSON if it is JSON. Raises `ConfigError` for an option
    without a name or a value.
    """
    arguments: dict[str, Any] = {}
    for option in vllm_arg or ():
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise ConfigError(f"--vllm-arg is {option!r}, must be NAME=VALUE.")
        try:
            arguments[name] = json.loads(value)
        except json.JSONDecodeError:
            arguments[name] = value
    options = {"tensor_parallel_size": tensor_parallel_size, "vllm_args": arguments}
    return {name: value for name, value in options.items() if value}


def wide_console() -> Console:
    """Return a console for tables, which is 200 columns wide if standard output is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=200)


def show_results(title: str, results: dict[str, Any], as_json: bool) -> None:
    """Print results as a table, followed by one line of JSON if `as_json` is set."""
    table = Table(title=title, show_header=False)
    for name, value in results.items():
        table.add_row(name.replace("_", " "), f"{value:,.4g}" if isinstance(value, float) else escape(str(value)))
    Console().print(table)
    if as_json:
        print(json.dumps(results))


def read_text(path: Path) -> str:
    """Return the text of a file that an option names. Raises `DataError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """Write results to a file, unless `path` is None. Raises `OutputError` if it cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One line per name, so that diffs show which numbers changed.
        lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in results.items())
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}.") from error


def print_line(line: str) -> None:
    """Print a line for people, next to the output of the command."""
    print(f"mars-ray: {line}", file=sys.stderr)
