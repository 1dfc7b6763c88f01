"""Draw the race at the top of the README as SVG.

    python -m pipelines.race_picture --model smollm2 --adapter smollm2 --output docs/race.svg

The races are the same as in `mars-ray demo --model`, run now on this machine. Each race is drawn at the moment when the
first setting has finished its answer.
"""

import argparse
import io
import re
from pathlib import Path

from rich.console import Console

from mars_ray.demo.race import PROMPTS, Race, Track
from mars_ray.demo.show import EXPLANATION, picture
from mars_ray.program import run_program
from pipelines.pipeline_files import write

WIDTH = 120
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Web fonts that rich adds, to be removed."""


def main() -> None:
    """Run the races, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="model to race")
    parser.add_argument("--adapter", help="adapter of the model")
    parser.add_argument("--output", type=Path, default=Path("docs/race.svg"))
    args = parser.parse_args()
    with Track(args.model, args.adapter) as track:
        races = [track.race(prompt) for prompt in PROMPTS]
    write(args.output, [drawn(races, track.label)])
    print(f"The picture is in {args.output}.")


def drawn(races: list[Race], label: str) -> str:
    """Return the picture of the races as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    for race in races:
        console.print(picture(race, race.first_s, console))
    console.print(EXPLANATION, style="dim")
    return FONTS.sub("", console.export_svg(title=f"mars-ray demo: {label}", unique_id="race"))


if __name__ == "__main__":
    run_program("race_picture", main)
