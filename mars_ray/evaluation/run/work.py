"""What an evaluation has to do, and whether a folder holds this very work or another.

In:    options.
Out:   tasks, settings, a plan to keep, and the rows of a job.
Never: decodes; begins with something that is not usable.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mars_ray.engine.request import SamplingParams
from mars_ray.engine.seeds import seed_of
from mars_ray.errors import ConfigError, OutputError, RequestError
from mars_ray.evaluation.judging.code_check import check_sandbox
from mars_ray.evaluation.judging.judge import row_id
from mars_ray.evaluation.results import Plan, read_model, write_model
from mars_ray.evaluation.settings import Setting, block_of, settings_of
from mars_ray.evaluation.tasks.registry import Question, Task, TaskOptions, open_tasks
from mars_ray.model.card import read_card
from mars_ray.model.digest import folder_digest
from mars_ray.model.dtype import AskedDtype, resolve_dtype
from mars_ray.model.folder import check_folder
from mars_ray.model.resolve import resolve_model
from mars_ray.model.tokenizer import load_tokenizer

PLAN_FILE = "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """What to evaluate, and how."""

    output: Path
    """A folder that is absent, empty, or holds this very evaluation, which then goes on."""
    tasks: tuple[str, ...]
    questions: TaskOptions
    model: str = "bundled"
    modes: tuple[str, ...] = ("ar", "exact", "threshold")
    thresholds: tuple[float, ...] = (0.99, 0.95, 0.9, 0.8, 0.6)
    temperature: float = 0.0
    """Above 0 each question has a seed of its own, the same at all settings."""
    workers: int = 1
    cpus: float | None = None
    """Of each worker, as of `generate`."""
    gpus: float = 0.0
    dtype: AskedDtype = "auto"
    compiled: bool = True
    """Where speed is measured; what is judged never is, for its answers would depend on when compiling ends."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is known before any work."""

    folder: Path
    model: Path
    tasks: tuple[Task, ...]
    settings: tuple[Setting, ...]
    plan: Plan
    options: EvaluateOptions
    """With the dtype resolved."""
    tokenizer: PreTrainedTokenizerBase

    @property
    def answers(self) -> Path:
        """Folder of the job that asks."""
        return self.folder / "answers"

    def sampling(self, task: Task, question: Question) -> SamplingParams:
        """Return how a question is sampled, at every setting."""
        return SamplingParams(
            max_tokens=task.max_tokens, temperature=self.options.temperature, seed=seed_of(question.name)
        )


def prepare(options: EvaluateOptions) -> Work:
    """Return the work. Raises an `InputError` for whatever is not usable."""
    settings = settings_of(options.modes, options.thresholds)
    try:
        SamplingParams(temperature=options.temperature)
    except RequestError as error:
        raise ConfigError(str(error)) from None
    tasks = open_tasks(options.tasks, options.questions)
    questions = [question for task in tasks for question in task.questions]
    if any(question.match == "code" for question in questions):
        check_sandbox()
    model = resolve_model(options.model)
    found = check_folder(model)
    tokenizer = load_tokenizer(model, found.config, found.tokenizer_is_custom)
    device = "cuda" if options.gpus else "cpu"
    options = replace(options, dtype=resolve_dtype(options.dtype, model, device).name)
    block = block_of(read_card(model), options.model, settings)
    digest = blake2b(digest_size=8)
    for task in tasks:
        for each in task.questions:
            told = [each.name, each.messages, each.reference, each.match]
            digest.update(json.dumps(told).encode() + b"\n")
    plan = Plan(
        model=Path(options.model).name,
        model_digest=folder_digest(model),
        block=block,
        dtype=options.dtype,
        device=device,
        tasks=tuple(task.name for task in tasks),
        max_tokens=tuple(task.max_tokens for task in tasks),
        seeds=options.questions.seeds,
        questions=len(questions),
        questions_digest=digest.hexdigest(),
        settings=tuple(setting.name for setting in settings),
        temperature=options.temperature,
        compiled=options.compiled,
    )
    return Work(options.output, model, tasks, settings, plan, options, tokenizer)


def agree(work: Work) -> None:
    """Keep the plan of a new evaluation.

    Raises `ConfigError` naming what differs from the plan that lies there, if anything was done by it.
    """
    folder, path = work.folder, work.folder / PLAN_FILE
    if path.exists() and work.answers.exists():
        kept, asked = read_model(path, Plan).model_dump(exclude={"model"}), work.plan.model_dump(exclude={"model"})
        for name in asked:
            if kept[name] != asked[name]:
                was, now = (json.dumps(value) for value in (kept[name], asked[name]))
                differs = f"{name} was {was}, now it is {now}"
                if name == "questions_digest":
                    differs = "a file, --match or --data has changed, so the questions are others"
                raise ConfigError(
                    f"the evaluation in {folder} began with another plan: {differs}. Use the old one or give another "
                    "output."
                )
        return
    if folder.exists() and not path.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} holds something that is no evaluation. Give a new folder or empty this one.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"Cannot write to {folder}: {error.strerror}. Give another output folder.") from error
    write_model(path, work.plan)


def rows_of(work: Work) -> Iterator[str]:
    """Yield the rows of the job: all settings of a question together, for they share its prompt in the cache."""
    for task in work.tasks:
        for question in task.questions:
            for setting in work.settings:
                row = {
                    "id": row_id(question, setting.name),
                    "messages": question.messages,
                    "mode": setting.mode.value,
                    "threshold": setting.threshold,
                    "max_tokens": task.max_tokens,
                    "seed": seed_of(question.name),
                }
                yield json.dumps(row)
