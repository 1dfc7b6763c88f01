"""Check the options of an evaluation before any work, and check that its folder holds no other evaluation.

Every question at every setting is a row of one job, so answers are spread over workers, written once, and resumed.
Each row names its mode, threshold and seed, so that answers depend on neither load nor time.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mars_ray.adapter.decoding_model import DecodingModel, open_decoding_model
from mars_ray.batch.run.options import WorkerOptions
from mars_ray.engine.checked_fields import Numbers, Texts, check_fields
from mars_ray.engine.mode import Mode
from mars_ray.engine.options import AtLeastOne
from mars_ray.engine.request import SamplingParams, seed_of
from mars_ray.errors import ConfigError, OutputError, RequestError
from mars_ray.evaluation.code_check import check_sandbox
from mars_ray.evaluation.results import EvaluationPlan, read_model, write_model
from mars_ray.evaluation.scorer import row_id
from mars_ray.evaluation.settings import ADAPTER_THRESHOLDS, MODEL_THRESHOLDS, DecodingSetting, block_of, settings_of
from mars_ray.evaluation.tasks import Question, Task, TaskOptions, open_tasks
from mars_ray.model.digest import folder_digest
from mars_ray.model.resolve import Name, model_label, pin
from mars_ray.storage.location import AnyPath, PathOrUrl, check_reachable, store_errors

PLAN_FILE = "plan.json"
NAMES_ONLY = {"model", "dtype_reason"}
"""Fields of a plan that may differ when a run is resumed, because the results do not depend on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """Tasks, model and settings of an evaluation. Raises `ConfigError` for an option of a wrong type."""

    output: PathOrUrl
    """Folder, local or in an object store. It must be absent or empty, or hold an earlier run of this evaluation, which
    is then resumed."""
    tasks: Texts
    """Names of task families or benchmarks, or paths of files with prompts and references."""
    questions: TaskOptions = field(default_factory=TaskOptions)
    model: Name = "bundled"
    """`bundled`, `smollm2`, a folder, a .gguf file or a name on a hub; see `resolve_model`."""
    adapter: Name | None = None
    """Adapter that was trained for the model: one in the package ('smollm2'), a folder, or a name on a hub."""
    modes: Texts = ("ar", "exact", "threshold")
    """Modes to compare; `ar` is always added."""
    thresholds: Numbers | None = None
    """Thresholds of mode `threshold`. None means `ADAPTER_THRESHOLDS` with an adapter, otherwise `MODEL_THRESHOLDS`."""
    block: AtLeastOne | None = None
    """Tokens proposed per forward, the same in all forwards so that answers do not depend on the load. None means the
    block of training. A smaller one costs less time where positions are dear."""
    temperature: float = 0.0
    """Sampling temperature. Above 0, each question has its own seed, which is the same in all settings."""
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    """Options of the workers."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class PreparedEvaluation:
    """A checked evaluation, ready to run."""

    folder: AnyPath
    decoding: DecodingModel
    tasks: tuple[Task, ...]
    settings: tuple[DecodingSetting, ...]
    plan: EvaluationPlan
    options: EvaluateOptions
    """Options with the resolved dtype, and with hub names pinned to commits."""
    tokenizer: PreTrainedTokenizerBase

    @property
    def answers(self) -> AnyPath:
        """Folder of the job that answers the questions."""
        return self.folder / "answers"

    def sampling(self, task: Task, question: Question) -> SamplingParams:
        """Return the sampling parameters of a question, which are the same at every setting."""
        return SamplingParams(
            max_tokens=task.max_tokens, temperature=self.options.temperature, seed=seed_of(question.name)
        )


def prepare_evaluation(options: EvaluateOptions) -> PreparedEvaluation:
    """Check the options and return the evaluation to run.

    Raises an `InputError` for unusable options, tasks or models.
    """
    usual = ADAPTER_THRESHOLDS if options.adapter else MODEL_THRESHOLDS
    if options.thresholds is not None and Mode.THRESHOLD not in options.modes:
        raise ConfigError("thresholds are given, but modes has no threshold. Add it, or leave the thresholds out.")
    settings = settings_of(options.modes, usual if options.thresholds is None else options.thresholds)
    try:
        SamplingParams(temperature=options.temperature)
    except RequestError as error:
        raise ConfigError(str(error)) from None
    options.workers.check_real_time("an evaluation")
    check_reachable(options.output)
    tasks = open_tasks(options.tasks, options.questions)
    questions = [question for task in tasks for question in task.questions]
    if any(question.match == "code" for question in questions):
        check_sandbox()
    decoding = open_decoding_model(options.model, options.adapter, options.workers.dtype, options.workers.device)
    model = decoding.base
    adapter = decoding.adapter
    tokenizer = model.load_tokenizer()
    options = replace(
        options,
        model=model.name,
        adapter=pin(options.adapter, adapter) if options.adapter and adapter else None,
        workers=replace(options.workers, dtype=model.dtype.name),
    )
    block = block_of(decoding.card, options.model, settings, options.block)
    plan = EvaluationPlan(
        model=model_label(options.model, model.folder),
        model_digest=folder_digest(model.folder),
        adapter_digest=folder_digest(adapter) if adapter else None,
        block=block,
        dtype=model.dtype.name,
        quantize=options.workers.quantize,
        dtype_reason=model.dtype.reason,
        device=options.workers.device,
        tasks=tuple(task.name for task in tasks),
        max_tokens=tuple(task.max_tokens for task in tasks),
        seeds=options.questions.seeds,
        questions=len(questions),
        questions_digest=_digest(questions),
        settings=tuple(setting.name for setting in settings),
        temperature=options.temperature,
    )
    return PreparedEvaluation(options.output, decoding, tasks, settings, plan, options, tokenizer)


def keep_plan(prepared: PreparedEvaluation) -> None:
    """Write the plan of a new evaluation, or compare it with the plan of the run that is resumed.

    Raises a `ConfigError`, which names the first difference, if an earlier run with answers had another plan, and an
    `OutputError` if the folder holds other files.
    """
    folder = prepared.folder
    path = folder / PLAN_FILE
    if path.exists() and prepared.answers.exists():
        earlier = read_model(path, EvaluationPlan).model_dump(exclude=NAMES_ONLY)
        plan = prepared.plan.model_dump(exclude=NAMES_ONLY)
        for name in plan:
            if earlier[name] != plan[name]:
                difference = f"{name} was {json.dumps(earlier[name])}, now it is {json.dumps(plan[name])}"
                if name == "questions_digest":
                    difference = "the questions differ, because a file, --match or --data has changed"
                raise ConfigError(
                    f"the evaluation in {folder} began with another plan: {difference}. Use the old one or "
                    "give another output."
                )
        return
    if folder.exists() and not path.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} has files that do not belong to an evaluation. Give a new folder, or empty it.")
    with store_errors(folder, OutputError, "Cannot write to", "Give another output folder."):
        if isinstance(folder, Path):  # an object store has no folders
            folder.mkdir(parents=True, exist_ok=True)
    write_model(path, prepared.plan)


def job_rows(prepared: PreparedEvaluation) -> Iterator[str]:
    """Yield the rows of the job, with all settings of a question together, so that they share its cached prompt."""
    for task in prepared.tasks:
        for question in task.questions:
            for setting in prepared.settings:
                row = {
                    "id": row_id(question, setting.name),
                    "messages": question.messages,
                    "mode": setting.mode.value,
                    "threshold": setting.threshold,
                    "max_tokens": task.max_tokens,
                    "seed": seed_of(question.name),
                }
                yield json.dumps(row)


def _digest(questions: Sequence[Question]) -> str:
    digest = blake2b(digest_size=8)
    for question in questions:
        fields = [question.name, question.messages, question.reference, question.match]
        digest.update(json.dumps(fields).encode() + b"\n")
    return digest.hexdigest()
