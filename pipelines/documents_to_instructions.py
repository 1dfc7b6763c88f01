"""Instruction data from documents, held to a JSON schema.

    python -m pipelines.documents_to_instructions --output runs/documents
    python -m pipelines.documents_to_instructions --output runs/mine --input 'docs/*.jsonl.zst' \\
        --model models/qwen2.5-7b --schema facts.json --template "List the facts of this text as JSON. {{ text }}"

1. documents: rows with a column `text`, or whatever the template names; without --input some are made up, for which
   the bundled model knows the job;
2. every document is asked about with the template and answered as JSON of the schema, by `generate` (Ray Data): the
   schema holds while tokens are chosen, several at a time;
3. each answer is checked once more with the `jsonschema` library; one that was cut off fails and is dropped;
4. `instructions.jsonl` has question and answer as conversations, which is what `mars-ray train` reads.

Stopped by Ctrl-C or a crash, the same command goes on; other settings need another output folder. Documents that could
not be asked about are in `answers/errors.jsonl`, each with its reason.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.run.options import GenerateOptions
from mars_ray.data.tasks import FAMILIES, examples
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import DataError
from mars_ray.program import run_program
from pipelines.pipeline_files import conversation, rows_in, write

QUESTION = "Extract name, age and city as JSON: "
"""A question that the bundled model was trained on."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string", "minLength": 1},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def main() -> None:
    """Ask, check, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/documents"), help="folder of the run")
    parser.add_argument("--input", nargs="+", help="files, folders or globs of JSONL (plain, gz, zst) or parquet")
    parser.add_argument("--schema", type=Path, help="JSON Schema; by default name, age and city of a person")
    parser.add_argument("--template", default=QUESTION + "{{ text }}", help="Jinja over the columns of a document")
    parser.add_argument(
        "--model", default="bundled", help="a model as everywhere: 'bundled', 'smollm2', a folder, a name on a hub"
    )
    parser.add_argument("--max-tokens", type=int, default=256, help="per answer at most")
    given = parser.parse_args()
    schema = read_schema(given.schema) if given.schema else json.dumps(PERSON)
    answers, instructions = given.output / "answers", given.output / "instructions.jsonl"
    sampling = SamplingParams(max_tokens=given.max_tokens, grammar=GrammarSpec(kind="json_schema", text=schema))
    report = generate_files(
        GenerateOptions(
            input=tuple(given.input or [made_up(given.output / "documents.jsonl")]),
            output=answers,
            model=given.model,
            sampling=sampling,
            template=given.template,
        )
    )
    came_to = Counter[str]()
    fields = json.loads(schema)
    write(instructions, records(answers, validator_for(fields)(fields), came_to))
    dropped = "".join(f", {count} dropped as {reason}" for reason, count in came_to.items() if reason != "kept")
    print(f"{came_to['kept']} of {report.rows} documents are instructions{dropped}, {report.errors} errors")
    print(f"{report.tokens_per_forward:.2f} tokens per forward; {instructions}")


def read_schema(path: Path) -> str:
    """Return the text of a schema; what is wrong with it, `generate` says before it starts."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}.") from None


def made_up(path: Path) -> str:
    """Write 500 sentences about people and return the path."""
    sentences = (
        each.prompt.removeprefix(QUESTION)
        for each in examples(FAMILIES["json_extract"], "train", seed=0)
        if each.prompt.startswith(QUESTION)
    )
    write(path, (json.dumps({"text": text}) for text in islice(sentences, 500)))
    return str(path)


def records(job: Path, validator: Validator, came_to: Counter[str]) -> Iterator[str]:
    """Yield the conversations whose answers hold to the schema, counting what came of all."""
    for row in rows_in(job):
        outcome = judged(row["text"], validator)
        came_to[outcome] += 1
        if outcome == "kept":
            yield conversation(row["prompt"], row["text"])


def judged(text: str, validator: Validator) -> str:
    """Return "kept", or why not."""
    try:
        return "kept" if validator.is_valid(json.loads(text)) else "not of the schema"
    except ValueError:
        return "not JSON"


if __name__ == "__main__":
    run_program("documents_to_instructions", main, stopped="Stopped. The same command goes on.")
