"""Read GSM8K and HumanEval from a folder, as published: `gsm8k/test.jsonl.gz` and `humaneval/HumanEval.jsonl.gz`.

Sources: GSM8K, arXiv 2110.14168; HumanEval, arXiv 2107.03374.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from mars_ray.data.record_file import check_source
from mars_ray.data.records import parse_object
from mars_ray.errors import BadRecordError, DataError
from mars_ray.evaluation.tasks.reference_file import Referenced, numbered
from mars_ray.evaluation.tasks.verify import last_number
from mars_ray.storage.location import AnyPath, check_reachable

BENCHMARK_TOKENS = 512
"""Maximum number of tokens per answer, enough for a derivation or a function."""
CODE_PROMPT = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{code}```"


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
    check_source(path)
    records = []
    for location, raw in numbered(path):
        try:
            fields = parse_object(raw)
            for name in text_fields:
                if not isinstance(fields.get(name), str):
                    raise BadRecordError(f"its {name!r} is missing or not text")
            records.append(record(fields))
        except BadRecordError as error:
            raise DataError(f"{path}, {location}: {error}.") from None
    return records
