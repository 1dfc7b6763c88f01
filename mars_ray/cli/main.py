"""The command line, which turns arguments into options and makes one call.

Results go to standard output, and progress and errors to standard error. An error that the user can fix is printed as
one line, and the exit code tells the kind of error (see `errors` and `program`).
"""

from importlib.metadata import version
from typing import Annotated

import typer

from mars_ray.cli.control import status, threshold_app
from mars_ray.cli.demo import demo
from mars_ray.cli.evaluate import evaluate
from mars_ray.cli.generate import generate
from mars_ray.cli.load import bench_app, plan, simulate
from mars_ray.cli.serve import serve
from mars_ray.cli.training import calibrate, prepare, train
from mars_ray.installed import HAS_PLATFORM
from mars_ray.program import run_program

app = typer.Typer(
    help="Fine-tune instruction models to decode several tokens at a time, and use them, on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(show: bool) -> None:
    if show:
        print(f"mars-ray {version('mars-ray')}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle the options that come before the command."""


for command in (status, generate, evaluate, train, prepare, calibrate, serve, demo, simulate, plan):
    app.command()(command)
for name, group in {"bench": bench_app, "threshold": threshold_app}.items():
    app.add_typer(group, name=name)
if HAS_PLATFORM:
    from mars_ray.platform.cli import add_commands

    add_commands(app)


def main() -> None:
    """Run the command line. An error that the user can fix is printed as one line."""
    show_only_downloads()
    run_program("mars-ray", app)


def show_only_downloads() -> None:
    """Hide transformers' progress of loaded weights, but not that of downloads, which transformers hides with it."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging

    users_choice = are_progress_bars_disabled()
    logging.disable_progress_bar()
    if not users_choice:
        enable_progress_bars()
