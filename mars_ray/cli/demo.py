"""The command `mars-ray demo`: the first look."""

from pathlib import Path
from typing import Annotated

import typer

from mars_ray.cli.options import MODEL_HELP, AdapterOption, AsJson


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the rows; made anew.")] = Path("out/demo"),
    model: Annotated[str | None, typer.Option(help=f"Race this one instead: {MODEL_HELP}")] = None,
    adapter: AdapterOption = None,
    as_json: AsJson = False,
) -> None:
    """Compare one token at a time, exact and a threshold: the bundled model over rows, or --model in a race."""
    if model is not None:
        from mars_ray.cli.race import race

        race(model, adapter, as_json)
        return
    from mars_ray.cli.ray_demo import demo as run
    from mars_ray.cli.ray_demo import demo_json, show_demo

    done = run(output)
    show_demo(done, output)
    if as_json:
        print(demo_json(done))
