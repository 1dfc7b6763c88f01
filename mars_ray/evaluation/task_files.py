"""Read prompts with references from files and benchmarks, and compare answers with the references.

A record of a file has `prompt` or `messages`, `reference`, and optionally `match`. The benchmarks are GSM8K (arXiv
2110.14168) and HumanEval (arXiv 2107.03374), as published: `gsm8k/test.jsonl.gz` and `humaneval/HumanEval.jsonl.gz`.
The first bad record raises an error that names the file and the record. Answers that are code are run by `code_check`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from reprlib import repr as shortened
from typing import Any

import regex

from mars_ray.data.prompt_file import Conversation, parsed_records, prompt_of
from mars_ray.data.tasks import FAMILIES
from mars_ray.data.tasks.checks import same_json, same_text
from mars_ray.errors import BadRecordError, ConfigError, DataError, EmptyDataError
from mars_ray.storage.location import AnyPath, check_reachable

_NUMBER = re.compile(r"(?<!\d)(?<!\d\.)-?\d[\d,]*(?:\.\d+)?|(?<![\d.])-?\.\d+")
"""Pattern of a number. A minus after a digit is read as subtraction, and dots before a number as an ellipsis."""
REGEX_SECONDS_MAX = 5
BENCHMARK_TOKENS = 512
"""Maximum number of tokens per answer, enough for a derivation or a function."""
CODE_PROMPT = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{code}```"


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None. Commas may group its digits."""
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _same_number(reference: str, text: str) -> bool:
    return last_number(text) == last_number(reference)


def _matches(reference: str, text: str) -> bool:
    try:
        return regex.search(reference, text, timeout=REGEX_SECONDS_MAX) is not None
    except TimeoutError:
        raise DataError(
            f"the regular expression {reference!r} takes more than {REGEX_SECONDS_MAX} s on an answer. Write it so "
            "that a text can match in only one way, and evaluate into another output."
        ) from None


FILE_MATCHES: dict[str, Callable[[str, str], bool]] = {"exact": same_text, "regex": _matches, "json": same_json}
"""Types of match for files: "exact" ignores surrounding white space, "regex" finds the reference in the text as a
regular expression, and "json" compares JSON values."""
MATCHES = FILE_MATCHES | {"number": _same_number} | {name: family.verify for name, family in FAMILIES.items()}


@dataclass(frozen=True, slots=True)
class Referenced:
    """A prompt, and the reference that its answer is compared with."""

    messages: Conversation
    reference: str
    match: str


def read_references(path: AnyPath, match: str) -> list[Referenced]:
    """Read all records; `match` applies to records that do not set one.

    Raises a `ConfigError` for an unknown match, and a `DataError` that names the first unusable record.
    """
    if match not in FILE_MATCHES:
        raise ConfigError(f"match is {match!r}, must be one of {', '.join(FILE_MATCHES)}.")
    records = parsed_records(path, lambda fields: _record(fields, match))
    if not records:
        raise EmptyDataError(f"{path} has no record.")
    return records


def _record(fields: dict[str, Any], default: str) -> Referenced:
    messages = prompt_of(fields)
    match = default if fields.get("match") is None else fields["match"]
    if not isinstance(match, str) or match not in FILE_MATCHES:
        raise BadRecordError(f"its match is {shortened(match)}, must be one of {', '.join(FILE_MATCHES)}")
    if fields.get("reference") is None:
        raise BadRecordError("it has no 'reference' to compare the answer with")
    return Referenced(messages, _reference(fields["reference"], match), match)


def _reference(value: Any, match: str) -> str:
    if match == "json":
        # A string is JSON source; any other value is the JSON value itself.
        text = value if isinstance(value, str) else json.dumps(value)
        if not same_json(text, text):
            raise BadRecordError(f"its reference is not JSON, or has a key twice: {shortened(value)}")
        return text
    not_finite = isinstance(value, float) and not isfinite(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not_finite:
        kind = type(value).__name__
        raise BadRecordError(f"its reference is {kind} {shortened(value)}; match {match} compares with text")
    # White space around answers is ignored, so it is removed here, too.
    text = str(value) if match == "regex" else str(value).strip()
    if match == "regex":
        try:
            matches_empty = regex.search(text, "") is not None
        except regex.error as error:
            raise BadRecordError(f"its reference is not a regular expression ({error}): {shortened(value)}") from None
        if matches_empty:
            raise BadRecordError(f"its reference matches every answer, even an empty one: {shortened(value)}")
    elif not text:
        raise BadRecordError("its reference is empty")
    return text


def _gsm8k(data: AnyPath) -> list[Referenced]:
    def record(fields: dict[str, Any]) -> Referenced:
        _, _, final = fields["answer"].rpartition("####")
        if last_number(final) is None:
            raise BadRecordError("its answer has no number after ####")
        return Referenced(_user_message(fields["question"]), final.strip(), "number")

    return _read(data / "gsm8k" / "test.jsonl.gz", ("question", "answer"), record)


def _humaneval(data: AnyPath) -> list[Referenced]:
    names = ("prompt", "test", "entry_point")

    def record(fields: dict[str, Any]) -> Referenced:
        if f"def {fields['entry_point']}" not in fields["prompt"]:
            raise BadRecordError(f"its prompt does not define its entry_point, {fields['entry_point']}")
        reference = json.dumps({name: fields[name] for name in names})
        return Referenced(_user_message(CODE_PROMPT.format(code=fields["prompt"])), reference, "code")

    return _read(data / "humaneval" / "HumanEval.jsonl.gz", names, record)


BENCHMARKS: Mapping[str, Callable[[AnyPath], list[Referenced]]] = {"gsm8k": _gsm8k, "humaneval": _humaneval}


def _user_message(question: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": question},)


def _read(
    path: AnyPath, text_fields: tuple[str, ...], record: Callable[[dict[str, Any]], Referenced]
) -> list[Referenced]:
    check_reachable(path)
    if not path.is_file():
        raise DataError(f"There is no file {path}; give the folder with {path.parent.name}/ as --data.")

    def parse(fields: dict[str, Any]) -> Referenced:
        for name in text_fields:
            if not isinstance(fields.get(name), str):
                raise BadRecordError(f"its {name!r} is missing or not text")
        return record(fields)

    return parsed_records(path, parse)
