"""Print a calibration as a table."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from mars_ray.model.card import CalibrationPoint

CURVE_HEAD = ("threshold", "tokens per forward", "agreement", "accuracy")


def curve_row(point: CalibrationPoint) -> tuple[str, ...]:
    """Return the cells of one table row, in the order of `CURVE_HEAD`. ± is the standard deviation over samples."""
    return (
        f"{point.threshold:g}",
        f"{point.tokens_per_forward:.2f}{_spread(point.tokens_per_forward_std, '.2f')}",
        f"{point.agreement:.2%}{_spread(point.agreement_std, '.2%')}",
        "-" if point.accuracy is None else f"{point.accuracy:.1%}{_spread(point.accuracy_std, '.1%')}",
    )


def print_curve(points: Sequence[CalibrationPoint], title: str) -> None:
    """Print the points as a table, with the number and source of the examples."""
    point = points[0]
    samples = f"{point.seeds} samples" if point.seeds > 1 else "1 sample, so no spread"
    table = Table(title=title, caption=f"{point.examples} examples of {point.data} in {samples}")
    for name in CURVE_HEAD:
        table.add_column(name, justify="right")
    for point in points:
        table.add_row(*curve_row(point))
    Console().print(table)


def _spread(value: float | None, form: str) -> str:
    return "" if value is None else f" ± {value:{form}}"
