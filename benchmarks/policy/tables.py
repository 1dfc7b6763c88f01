"""Print the tables of the comparison of policies."""

from typing import Any

from rich.console import Console
from rich.table import Table

LOADS = (0.6, 0.8, 1.0, 1.2, 1.3)
"""Loads, as multiples of the largest at which threshold 1 meets the SLO for 99 of 100 requests."""
OURS = "capacity (ours)"
ORACLE = "oracle"
ORACLE_LOAD = 1.2
"""Load at which the oracle runs; only one, because it takes many simulations."""


def show_trace(name: str, report: dict[str, Any]) -> None:
    """Print the scores by load, the dominated contenders, and the replicas used with autoscaling."""
    console = Console()
    title = f"{name}: threshold 1 meets the SLO up to {report['capacity_requests_per_s']:.1f} requests/s"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for load in LOADS:
        table.add_column(f"{load} x: SLO met, accuracy", justify="right")
    table.add_column("largest load", justify="right")
    for contender in report["contenders"]:
        cells = []
        for load in LOADS:
            figures = report["loads"][str(load)].get(contender)
            cells.append(
                f"{figures['good']:.4f} ± {figures['good_std']:.4f}  {figures['accuracy']:.4f}" if figures else ""
            )
        largest = report["largest_load"].get(contender)
        table.add_row(contender, *cells, "" if largest is None else f"{largest:.2f} x")
    console.print(table)
    for load, pairs in report["dominated"].items():
        beaten = ", ".join(f"{loser} by {winner}" for loser, winner in pairs) or "none"
        console.print(f"at {load} x worse in both, beyond chance: {beaten}", soft_wrap=True)
    given_up = report["quality_given_up_against_oracle"]
    if given_up is not None:
        at_load = report["loads"][str(ORACLE_LOAD)]
        ours, oracle = (100 * (at_load["fixed 1.0"]["accuracy"] - at_load[name]["accuracy"]) for name in (OURS, ORACLE))
        console.print(
            f"at {ORACLE_LOAD} x {OURS} gives up {ours:.2f} points of accuracy and the oracle {oracle:.2f}: "
            f"{given_up:.2f} times as much",
            soft_wrap=True,
        )
    for contender, figures in report["autoscaled"].items():
        console.print(
            f"autoscaled at 1.2 x, {contender}: {figures['replica_minutes']:.0f} replica-minutes, SLO met "
            f"{figures['good']:.4f}, agreement {figures['agreement']:.5f}",
            soft_wrap=True,
        )


def show_steady(steady: dict[str, Any]) -> None:
    """Print how often thresholds change, and how they recover from a peak."""
    columns = ("", "changes a minute at 0.6", "at 0.9", "back at full quality after", "SLO met")
    table = Table(*columns, title="Steady load, and a peak of two minutes", title_justify="left")
    for name, figures in steady.items():
        changes = figures["changes_per_minute"].values()
        table.add_row(
            name,
            *(f"{rate:.2f}" for rate in changes),
            f"{figures['back_at_full_quality_s']:.0f} s",
            f"{figures['good_in_peak']:.4f}",
        )
    Console().print(table)
