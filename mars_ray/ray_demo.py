"""The first offline job: the bundled model over the bundled prompts, one token at a time and several (shell)."""

import json
import shutil
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from mars_ray.batch.plain_form import PlainSettings
from mars_ray.batch.ray_generate import GenerateOptions, generate
from mars_ray.batch.report import JobReport
from mars_ray.data.tasks import verify
from mars_ray.engine.request import DecodeParams, SamplingParams

THRESHOLDS = (1.0, 0.95)
SHOWN_ROWS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRow:
    """What one threshold gave."""

    threshold: float
    accuracy: float
    """Share of the rows that the exact verifier of their family accepts."""
    report: JobReport


def demo(output: Path) -> list[DemoRow]:
    """Generate every bundled prompt at each threshold into `output/threshold-<t>`, replacing what lies there."""
    prompts = Path(str(files("mars_ray") / "assets" / "prompts.jsonl"))
    expected = {row["id"]: row for row in map(json.loads, prompts.read_text().splitlines())}
    done = []
    for threshold in THRESHOLDS:
        folder = output / f"threshold-{threshold}"
        shutil.rmtree(folder, ignore_errors=True)
        form = PlainSettings(sampling=SamplingParams(max_tokens=128), decode=DecodeParams(threshold=threshold))
        report = generate(GenerateOptions(input=(str(prompts),), output=folder, form=form))
        rows = read_rows(folder)
        right = sum(verify(expected[row["id"]]["family"], expected[row["id"]]["answer"], row["text"]) for row in rows)
        done.append(DemoRow(threshold=threshold, accuracy=right / len(expected), report=report))
    return done


def show_demo(done: list[DemoRow], output: Path) -> None:
    """Print the comparison and a few of the generated rows."""
    table = Table(title="The bundled model on this machine")
    for column in ("threshold", "rows", "tokens/s", "tokens per forward", "exact match"):
        table.add_column(column, justify="right")
    for row in done:
        report = row.report
        table.add_row(
            f"{row.threshold}",
            f"{report.rows}",
            f"{report.tokens_per_s:,.0f}",
            f"{report.tokens_per_forward:.2f}",
            f"{row.accuracy:.1%}",
        )
    console = Console()
    console.print(table)
    generated = read_rows(output / f"threshold-{THRESHOLDS[-1]}")
    for each in generated[:: max(1, len(generated) // SHOWN_ROWS)][:SHOWN_ROWS]:
        console.print(f"\n[bold]{each['id']}[/bold]  {each['tokens']} tokens in {each['forwards']} forwards")
        console.print(each["prompt"], style="dim", markup=False, highlight=False)
        console.print(each["text"], markup=False, highlight=False)
    console.print(f"\nAll rows: {output}", highlight=False)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """Return what a job wrote into its output folder."""
    rows: list[dict[str, Any]] = pq.read_table(folder / "rows").to_pylist()
    return rows


def demo_json(done: list[DemoRow]) -> str:
    """Return the comparison as one line."""
    return json.dumps([asdict(row) for row in done])
