"""Plan a job before any work starts: input files, row format, engines, and the settings to store in the ledger.

An input is refused if none of its first rows can be answered.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

from pydantic import TypeAdapter

from mars_ray.adapter.decoding_model import DecodingModel, open_decoding_model
from mars_ray.batch.output.folder import FileFormat, OutputFolder
from mars_ray.batch.rows.columns import ColumnKinds
from mars_ray.batch.rows.openai_format import OpenAIFormatSettings, is_openai_batch
from mars_ray.batch.rows.plain_format import PlainFormatSettings
from mars_ray.batch.rows.row_format import RowFormat, RowFormatSettings, parsed_row
from mars_ray.batch.run.engine_plan import EnginePlan, plan_engines
from mars_ray.batch.run.input_files import JobInput, find_input
from mars_ray.batch.run.options import GenerateOptions
from mars_ray.data.input_file import InputFile
from mars_ray.data.records import parse_object
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.engine.grammar.library import check_grammar
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import (
    BadRecordError,
    ConfigError,
    DataError,
    EmptyDataError,
    PromptTooLongError,
    RequestError,
    check_kind,
    did_you_mean,
)
from mars_ray.model.digest import folder_digest
from mars_ray.model.dtype import ResolvedDtype
from mars_ray.model.resolve import short_name

FIRST_ROWS = 100
"""Maximum number of rows to check."""
ROW_BYTES = 1 << 20
"""Maximum size of a row to check. A longer row is left to a worker, because tokenizing it here could take minutes."""
REASONS = 3
"""Maximum number of reasons to show, most frequent first."""
COLUMNS = 12
"""Maximum number of columns to list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Checked plan of a job."""

    options: GenerateOptions
    input: JobInput
    engines: EnginePlan
    row_format: RowFormatSettings
    settings: dict[str, Any]
    """Settings that affect the answers, by dotted name. A resumed job must have the same settings."""

    @property
    def file_format(self) -> FileFormat:
        """File format of the output."""
        format: FileFormat = self.settings["format"]
        return format

    @property
    def reported_settings(self) -> dict[str, Any]:
        """Settings to show in the report, including the names and digests of model and adapter, and why the dtype was
        chosen."""
        names = {"model": self.options.model, "adapter": self.options.adapter}
        digests = {f"{name}_digest": self.settings[name] for name in names}
        return self.settings | names | digests | {"dtype_reason": self.engines.model.dtype.reason}

    def output_columns(self, kinds: ColumnKinds) -> ColumnKinds:
        """Return the input columns to keep in the output. The column `prompt` is left out if it is the source of the
        prompts. The output of an OpenAI batch file has no input columns."""
        if isinstance(self.row_format, OpenAIFormatSettings):
            return {}
        default = self.options.template is None and self.options.prompt_column is None and "messages" not in kinds
        return {name: values for name, values in kinds.items() if not (default and name == "prompt")}

    def agree_with(self, output: OutputFolder) -> "JobPlan":
        """Return the plan with the dtype that the job in `output` began with, and store the plan's settings in the
        ledger.

        Raises `ConfigError` if a setting differs from the stored one.
        """
        plan = self
        if self.options.workers.dtype == "auto" and (name := output.ledger.settings().get("dtype")) is not None:
            dtype = ResolvedDtype(name, "the job began with this dtype")
            engines = replace(self.engines, model=replace(self.engines.model, dtype=dtype))
            plan = replace(self, engines=engines, settings=self.settings | {"dtype": name})
        output.ledger.check_settings(plan.settings)
        return plan


def plan_job(options: GenerateOptions, model: DecodingModel | None = None) -> JobPlan:
    """Return the plan of a job. Raises an `InputError` for unusable options, model or input.

    `model` is what `options` name, if a caller has opened it already.
    """
    check_kind("options", options, GenerateOptions)
    options.check()
    sampling = options.sampling or SamplingParams()
    if sampling.grammar is not None:
        check_grammar(sampling.grammar)
    workers = options.workers
    engines, decode = plan_engines(
        model or open_decoding_model(options.model, options.adapter, workers.dtype, workers.device),
        workers=workers,
        decode=options.decode,
        deadline_s=options.deadline_s,
        max_quality_loss=options.max_quality_loss,
    )
    base = engines.model
    job_input = find_input(options.input, options.output)
    rows = _rows(job_input.files)
    first = next(rows, None)
    if first is None:
        raise EmptyDataError(f"{', '.join(str(file.path) for file in job_input.files)} holds no rows.")
    openai = is_openai_batch(first)
    row_format: RowFormatSettings
    if openai:
        _refuse_unused(options)
        job_input = job_input.without_partitions()
        row_format = OpenAIFormatSettings(model_name=short_name(options.model), decode=decode)
    else:
        row_format = PlainFormatSettings(
            sampling=replace(sampling, **generation_defaults(base.folder))
            if options.sampling is None or options.sampling_of_model
            else sampling,
            decode=decode,
            template=options.template,
            prompt_column=options.prompt_column,
            trace=options.trace,
        )
    check_first_rows(row_format.open(base), islice(chain([first], rows), options.limit), base.max_positions)
    settings = {
        "model": folder_digest(base.folder),
        "adapter": folder_digest(engines.adapter) if engines.adapter else None,
        "dtype": base.dtype.name,
        "quantize": options.workers.quantize,
        "engine": options.workers.engine,
        "rehearse": engines.workers.rehearse,
        "threshold": engines.control.ceiling,
        "row_format": "openai" if openai else "plain",
        "format": "jsonl" if openai else options.format,
        **_flat(row_format),
    }
    return JobPlan(options=options, input=job_input, engines=engines, row_format=row_format, settings=settings)


def _refuse_unused(options: GenerateOptions) -> None:
    """Raise `ConfigError` if an option is set that OpenAI batch files do not use."""
    unused = [name for name in ("template", "prompt_column", "trace") if getattr(options, name)]
    if options.sampling is not None:
        unused.append("sampling parameters such as temperature and max_tokens")
    if unused:
        raise ConfigError(
            f"{', '.join(unused)}: the input is an OpenAI batch file, whose rows hold the parameters of their answers "
            "in `body`. Set them there, and leave the options out."
        )


def _rows(files: Sequence[InputFile]) -> Iterator[bytes]:
    """Yield the rows one by one, without reading ahead."""
    return (raw for file in files for [raw] in file.read(1))


def _flat(row_format: RowFormatSettings) -> dict[str, Any]:
    """Return the settings of a row format as JSON values, by dotted name."""
    flat: dict[str, Any] = {}
    nested = [("", TypeAdapter[Any](type(row_format)).dump_python(row_format, mode="json"))]
    while nested:
        prefix, values = nested.pop()
        for name, value in values.items():
            if isinstance(value, dict) and value:
                nested.append((f"{prefix}{name}.", value))
            else:
                flat[f"{prefix}{name}"] = value
    return flat


def check_first_rows(row_format: RowFormat, raws: Iterable[bytes], positions: int) -> None:
    """Raise `DataError` if none of the first rows can be answered. It names the most frequent reasons and the columns.

    `positions` is the context length of the model.
    """
    reasons = Counter[str]()
    columns: dict[str, None] = {}
    missing: dict[str, None] = {}
    for raw in islice(raws, FIRST_ROWS):
        if len(raw) > ROW_BYTES:
            return
        try:
            request = parsed_row(row_format, "first", raw).request
            if len(request.prompt) + min(1, request.sampling.max_tokens) <= positions:
                return
            raise PromptTooLongError(
                f"its prompt has {len(request.prompt)} tokens; with its answer it may have {positions} at most"
            )
        except (BadRecordError, RequestError) as error:
            reasons[str(error).rstrip(".")] += 1
            missing |= dict.fromkeys(error.missing if isinstance(error, BadRecordError) else ())
        columns |= dict.fromkeys(_columns(raw))
    if reasons:
        raise DataError(_refusal(reasons, list(columns), list(missing)))


def _refusal(reasons: Counter[str], columns: list[str], missing: list[str]) -> str:
    count = reasons.total()
    rows = "the only row cannot" if count == 1 else f"none of the first {count} rows can"
    parts = [f"{rows} be answered."]
    parts += [f"{times} x {reason}." for reason, times in reasons.most_common(REASONS)]
    if columns:
        more = f" and {len(columns) - COLUMNS} more" if len(columns) > COLUMNS else ""
        parts.append(f"The columns are {', '.join(columns[:COLUMNS])}{more}.")
    hint = next(filter(None, (did_you_mean(name, columns) for name in missing)), "")
    parts.append(hint.strip() or "Correct the input, or name its column with --prompt-column.")
    return " ".join(parts)


def _columns(raw: bytes) -> list[str]:
    try:
        return [name.encode(errors="backslashreplace").decode() for name in parse_object(raw)]
    except (BadRecordError, RecursionError):
        return []
