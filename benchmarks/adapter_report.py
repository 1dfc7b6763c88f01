"""Write the report of `benchmarks/adapter.py` as Markdown."""

from collections.abc import Iterator, Sequence
from typing import Any

from pipelines.pipeline_files import markdown_table

Json = dict[str, Any]

HEAD = ("", "tokens per forward", "tokens/s", "times `ar`", "agreement", "same answers", "right", "p")
CALLERS_HEAD = ("callers", "setting", "tokens per forward", "tokens/s", "times `ar`", "times exact")


def markdown(report: Json) -> str:
    """Return a table for each workload."""
    machine = report["machine"]
    parts = [
        "# Adapters",
        f"{machine['cpu']}, {report['threads']} threads, {report['dtype']}, commit {machine['commit']}; "
        "made by `benchmarks/adapter.py`.",
    ]
    for name, workload in report["workloads"].items():
        parts += [f"## {name}", _about(workload), markdown_table(HEAD, _rows(workload)).rstrip()]
        if callers := workload.get("callers"):
            parts += [
                "Several requests at once, including prefill, in turns:",
                markdown_table(CALLERS_HEAD, _callers(callers)).rstrip(),
            ]
    return "\n\n".join(parts) + "\n"


def _about(workload: Json) -> str:
    adapter = workload["adapter"]
    quality = workload.get("quality")
    speed = workload.get("speed")
    sentences = [f"{workload['model']}, adapter after {adapter['steps']} steps, {adapter['tokens']:,} tokens."]
    if speed:
        sentences.append(
            f"Speed: {speed['prompts']} prompts, one at a time, {speed['max_tokens']} tokens each, medians of rounds "
            "in turns, without prefill."
        )
        sentences += [f"{name}: {reason}." for name, reason in speed["absent"].items()]
    if quality:
        sentences.append(
            f"Quality: {quality['prompts']} prompts, {quality['max_tokens']} tokens at most; 95 % intervals (Wilson), "
            "p of McNemar's test against `ar`. Agreement is judged through torch; that of `ar` shows its rounding."
        )
    return " ".join(sentences)


def _rows(workload: Json) -> Iterator[list[str]]:
    quality = workload.get("quality", {}).get("settings", {})
    speed = workload.get("speed", {}).get("settings", {})
    for name in speed | quality:
        yield [name, *_speed_cells(speed.get(name)), *_quality_cells(quality.get(name), workload)]


def _callers(callers: Sequence[Json]) -> Iterator[list[str]]:
    for figures in callers:
        for name, setting in figures["settings"].items():
            times_exact = setting["times_exact"]
            spread = f"{times_exact['median']:.2f} ({times_exact['min']:.2f}-{times_exact['max']:.2f})"
            yield [str(figures["callers"]), f"`{name}`", *_speed_cells(setting), spread]


def _speed_cells(speed: Json | None) -> list[str]:
    if speed is None:
        return [""] * 3
    rate = speed["tokens_per_s"]
    times = speed["times_ar"]
    return [
        f"{speed['tokens_per_forward']:.2f}",
        f"{rate['median']:.0f} ({rate['min']:.0f}-{rate['max']:.0f})",
        f"{times['median']:.2f} ({times['min']:.2f}-{times['max']:.2f})",
    ]


def _quality_cells(quality: Json | None, workload: Json) -> list[str]:
    if quality is None:
        return [""] * 4
    prompts = workload["quality"]["prompts"]
    verdict = ["", ""]
    if "right" in quality:
        low, high = quality["interval"]
        share = quality["right"] / prompts
        verdict = [f"{share:.1%} ({low:.1%}-{high:.1%})", f"{quality['p_value']:.2g}"]
    agreement = f"{quality['agreement']:.2%}" if "agreement" in quality else ""
    return [agreement, f"{quality['same_answers'] / prompts:.0%}", *verdict]
