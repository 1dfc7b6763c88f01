"""Measure the cost of a JSON schema: the same rows with and without one, in turns in one process.

    python -m benchmarks.batch_schema --rows 1000 --json benchmarks/results/DATE-batch-schema.json

Rows come from the bundled model's JSON task (`json_extract`), and the task's own verifier judges the answers. A row's
schema has the keys of its right answer, each text or a whole number. Both contenders answer each part of the rows in
turn, with an empty cache, after a part that does not count.
"""

import argparse
import json
import time
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import jsonschema
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.report import write_report
from mars_ray.data.chat import ChatEncoder
from mars_ray.data.tasks import is_right_answer
from mars_ray.data.tasks.registry import FAMILIES
from mars_ray.data.tasks.split import examples
from mars_ray.engine.core.engine import Engine
from mars_ray.engine.core.offline import run_steps
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import EngineOptions
from mars_ray.engine.request import DecodeParams, Request, SamplingParams
from mars_ray.measure import deviation
from mars_ray.model.checkpoint import load_checkpoint
from mars_ray.model.resolve import resolve_model
from mars_ray.program import run_program

DECODING = {
    "threshold 0.95": DecodeParams(threshold=0.95),
    "exact": DecodeParams(mode=Mode.EXACT),
}
TASK = "json_extract"
PART = 100


def main() -> None:
    """Measure, print, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = load_checkpoint(resolve_model("bundled"))
    engine = Engine(checkpoint, EngineOptions(max_waiting_seqs=arguments.rows))
    encoder = ChatEncoder(checkpoint.tokenizer)
    rows = list(islice(examples(FAMILIES[TASK], "heldout", 0), PART + arguments.rows))
    decoding: dict[str, Any] = {}
    table = Table(title=f"{arguments.rows} rows of {TASK}, tokens/s by parts of {PART} rows")
    for column in ("", "schema", "tokens/s", "rows/s", "valid", "right"):
        table.add_column(column, justify="right")
    for name, decode in DECODING.items():
        results: dict[str, Any] = {}
        for start in range(0, len(rows), PART):  # the first part does not count
            part = rows[start : start + PART]
            for label in ("with", "without") if start // PART % 2 else ("without", "with"):
                requests = [
                    Request(
                        id=str(number),
                        prompt=tuple(encoder.prompt(({"role": "user", "content": row.prompt},))),
                        sampling=SamplingParams(max_tokens=96, grammar=_spec(row.answer) if label == "with" else None),
                        decode=decode,
                    )
                    for number, row in enumerate(part)
                ]
                tokens, seconds, texts = _decoded(engine, requests)
                if start == 0:
                    continue
                figures = results.setdefault(label, {"tokens_per_s": [], "rows_per_s": [], "valid": 0, "right": 0})
                figures["tokens_per_s"].append(tokens / seconds)
                figures["rows_per_s"].append(len(part) / seconds)
                figures["valid"] += sum(_valid(text, row.answer) for text, row in zip(texts, part, strict=True))
                figures["right"] += sum(
                    is_right_answer(TASK, row.answer, text) for text, row in zip(texts, part, strict=True)
                )
        decoding[name] = results
        for label, figures in results.items():
            rate = figures["tokens_per_s"]
            per_row = figures["rows_per_s"]
            row = (f"{mean(rate):,.0f} ± {deviation(rate):,.0f}", f"{mean(per_row):.1f} ± {deviation(per_row):.1f}")
            table.add_row(name, label, *row, f"{figures['valid']}", f"{figures['right']}")
    Console().print(table)
    write_report(arguments.json, {"decoding": decoding})


def _decoded(engine: Engine, requests: list[Request]) -> tuple[int, float, list[str]]:
    texts = [""] * len(requests)
    tokens = 0
    engine.clear_cache()
    started_s = time.monotonic()
    for chunks in run_steps(engine, requests):
        for chunk in chunks:
            texts[int(chunk.request_id)] += chunk.text
            tokens += len(chunk.tokens)
    return tokens, time.monotonic() - started_s, texts


def _schema(answer: str) -> dict[str, Any]:
    fields = json.loads(answer)
    kinds = {name: {"type": "integer" if isinstance(value, int) else "string"} for name, value in fields.items()}
    return {"type": "object", "properties": kinds, "required": list(kinds), "additionalProperties": False}


def _spec(answer: str) -> GrammarSpec:
    return GrammarSpec(kind="json_schema", text=json.dumps(_schema(answer)))


def _valid(text: str, answer: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), _schema(answer))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


if __name__ == "__main__":
    run_program("benchmarks.batch_schema", main)
