"""Make instruction data from documents, with answers constrained by a JSON schema.

    python -m pipelines.documents_to_instructions --output runs/documents
    python -m pipelines.documents_to_instructions --output runs/mine --input 'docs/*.jsonl.zst' \\
        --model models/qwen2.5-7b --schema facts.json --template "List the facts of this text as JSON. {{ text }}"

1. take documents: rows with the columns that the template uses, by default `text`. Without --input, generated
   documents of a kind that the bundled model was trained on are used;
2. fill the template with each document, and let `generate` (Ray Data) answer with JSON that matches the schema;
3. check each answer again with the `jsonschema` library, which also drops answers that were cut off;
4. write questions and answers to `instructions.jsonl`, which `mars-ray train` reads.

The same command resumes after Ctrl-C or a crash; other settings need another output folder. Documents that do not fit
the template are listed in `answers/errors.jsonl` with the reason.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from jsonschema.protocols import Validator
from jsonschema.validators import validator_for

from mars_ray.batch.ray.generate_files import generate_files
from mars_ray.batch.run.options import GenerateOptions
from mars_ray.cli.shared import read_text
from mars_ray.data.tasks import FAMILIES, examples
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.engine.request import SamplingParams
from mars_ray.program import run_program
from pipelines.pipeline_files import conversation, rows_in, write

QUESTION = "Extract name, age and city as JSON: "
"""A question in the form that the bundled model was trained on."""

PERSON: dict[str, Any] = {
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
    """Answer, check and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/documents"), help="folder of the run")
    parser.add_argument("--input", nargs="+", help="files, folders or globs of JSONL (plain, gz, zst) or parquet")
    parser.add_argument("--schema", type=Path, help="file with a JSON Schema; default: name, age and city of a person")
    parser.add_argument(
        "--template", default=QUESTION + "{{ text }}", help="Jinja template over the columns of a document"
    )
    parser.add_argument("--model", default="bundled", help="'bundled', 'smollm2', a folder, or a name on a hub")
    parser.add_argument("--max-tokens", type=int, default=256, help="maximum tokens per answer")
    args = parser.parse_args()
    schema = read_text(args.schema) if args.schema else json.dumps(PERSON)
    answers = args.output / "answers"
    instructions = args.output / "instructions.jsonl"
    sampling = SamplingParams(max_tokens=args.max_tokens, grammar=GrammarSpec(kind="json_schema", text=schema))
    report = generate_files(
        GenerateOptions(
            input=tuple(args.input or [generated_documents(args.output / "documents.jsonl")]),
            output=answers,
            model=args.model,
            sampling=sampling,
            template=args.template,
        )
    )
    outcomes = Counter[str]()
    fields = json.loads(schema)
    write(instructions, records(answers, validator_for(fields)(fields), outcomes))
    dropped = "".join(f", {count} dropped as {reason}" for reason, count in outcomes.items() if reason != "kept")
    print(f"{outcomes['kept']} of {report.rows} documents are instructions{dropped}, {report.errors} errors")
    print(f"{report.tokens_per_forward:.2f} tokens per forward; {instructions}")


def generated_documents(path: Path) -> str:
    """Write 500 sentences about people, and return the path of the file."""
    sentences = (
        example.prompt.partition(": ")[2]
        for example in examples(FAMILIES["json_extract"], "train", seed=0)
        if example.prompt.startswith("Extract ") and json.loads(example.answer).keys() == PERSON["properties"].keys()
    )
    write(path, (json.dumps({"text": text}) for text in islice(sentences, 500)))
    return str(path)


def records(job: Path, validator: Validator, outcomes: Counter[str]) -> Iterator[str]:
    """Yield the conversations with valid answers, and count all outcomes."""
    for row in rows_in(job):
        outcome = judged(row["text"], validator)
        outcomes[outcome] += 1
        if outcome == "kept":
            yield conversation(row["prompt"], row["text"])


def judged(text: str, validator: Validator) -> str:
    """Return "kept", or the reason to drop an answer."""
    try:
        return "kept" if validator.is_valid(json.loads(text)) else "not matching the schema"
    except ValueError:
        return "not JSON"


if __name__ == "__main__":
    run_program("documents_to_instructions", main, stopped="Stopped. Run the same command to continue.")
