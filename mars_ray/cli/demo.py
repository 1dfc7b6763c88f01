"""The command `mars-ray demo`: the first look."""

from pathlib import Path
from typing import Annotated

import typer

from mars_ray.cli.options import AsJson


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the rows; made anew.")] = Path("out/demo"),
    as_json: AsJson = False,
) -> None:
    """Generate rows with the bundled model one token at a time, exactly but sooner, and at threshold 0.95; compare."""
    from mars_ray.cli.ray_demo import demo as run
    from mars_ray.cli.ray_demo import demo_json, show_demo

    done = run(output)
    show_demo(done, output)
    if as_json:
        print(demo_json(done))
