"""Open tasks by their names. A task is a set of questions with references.

For a family, each seed is a different sample of its held-out examples. The records of a file are dealt to the seeds in
turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mars_ray.data.prompt_file import Conversation
from mars_ray.data.tasks import FAMILIES
from mars_ray.data.tasks.split import heldout_samples
from mars_ray.engine.checked_fields import check_fields
from mars_ray.errors import ConfigError, DataError, did_you_mean
from mars_ray.evaluation.task_files import BENCHMARK_TOKENS, BENCHMARKS, Referenced, read_references
from mars_ray.storage.location import PathOrUrl, check_reachable, locate

ALL_FAMILIES = "families"
EXAMPLES_PER_FAMILY = 100
"""Default number of examples per family in each sample."""
FAMILY_QUESTIONS = 100_000
"""Maximum number of questions per family, because an evaluation keeps all of them in memory."""
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt of a task, and the reference that its answer is compared with."""

    task: str
    number: int
    """Index within the task and seed, from 0."""
    seed: int
    messages: Conversation
    reference: str
    match: str
    """Kind of comparison with the reference: a name in `task_files.MATCHES`, or "code"."""

    @property
    def name(self) -> str:
        """Unique name of the question."""
        return f"{self.task}/{self.number}/{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A named set of questions."""

    name: str
    questions: tuple[Question, ...]
    max_tokens: int
    """Maximum number of tokens per answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """Number and source of the questions. Raises `ConfigError` for an option of a wrong type."""

    examples: int | None = None
    """Examples per task and seed. None means `EXAMPLES_PER_FAMILY` for a family, and all records for a file."""
    seeds: int = 3
    max_tokens: int | None = None
    """Maximum number of tokens per answer; None uses the default of each task."""
    match: str = "exact"
    """Kind of comparison for those records of a file that do not set one."""
    data: PathOrUrl | None = None
    """Folder with the benchmarks."""
    allow_code_execution: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


def open_tasks(names: Sequence[str], options: TaskOptions) -> tuple[Task, ...]:
    """Return the tasks in the order of `names`. Raises `ConfigError` or `DataError` for an unusable task or option."""
    for name, value in (("seeds", options.seeds), ("examples", options.examples), ("max_tokens", options.max_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}, must be at least 1.")
    task_names = [task for name in names for task in (FAMILIES if name == ALL_FAMILIES else [name])]
    if not task_names:
        raise ConfigError(f"no task given; choose from {', '.join(_task_names())}, or give a JSONL file.")
    benchmarks = BENCHMARKS.keys() & set(task_names)
    for name, unused, needed in (
        ("match", options.match != "exact" and not set(task_names) - FAMILIES.keys() - benchmarks, "a JSONL file"),
        ("data", options.data is not None and not benchmarks, " or ".join(BENCHMARKS)),
    ):
        if unused:
            raise ConfigError(f"{name} has no effect without {needed} among the tasks. Leave it out.")
    tasks = [_open(name, options) for name in dict.fromkeys(task_names)]
    names_seen = [task.name for task in tasks]
    for name in names_seen:
        if names_seen.count(name) > 1:
            raise ConfigError(f"two tasks have the name {name!r}; rename a file.")
    if options.max_tokens is not None:
        tasks = [replace(task, max_tokens=options.max_tokens) for task in tasks]
    return tuple(tasks)


def _open(name: str, options: TaskOptions) -> Task:
    if name in FAMILIES:
        return _family(name, options)
    if name in BENCHMARKS:
        if name == "humaneval" and not options.allow_code_execution:
            raise ConfigError("humaneval runs code that the model wrote; give --allow-code-execution to allow that.")
        if options.data is None:
            raise ConfigError(f"{name} needs --data, the folder with {name}/.")
        return _dealt(name, BENCHMARKS[name](options.data), options, BENCHMARK_TOKENS, str(options.data))
    path = locate(name)
    check_reachable(path)
    if not path.is_file():
        names = _task_names()
        raise ConfigError(
            f"{name!r} is neither a task nor a file; choose from {', '.join(names)}.{did_you_mean(name, names)}"
        )
    return _dealt(path.name.split(".")[0] or path.name, read_references(path, options.match), options, MAX_TOKENS, name)


def _task_names() -> list[str]:
    return [*FAMILIES, ALL_FAMILIES, *BENCHMARKS]


def _family(name: str, options: TaskOptions) -> Task:
    count = options.examples or EXAMPLES_PER_FAMILY
    if count * options.seeds > FAMILY_QUESTIONS:
        raise ConfigError(
            f"{options.seeds} samples of {count:,} examples are more than the {FAMILY_QUESTIONS:,} questions that a "
            "family may have. Lower --examples or --seeds."
        )
    questions = tuple(
        Question(
            task=name,
            number=number,
            seed=seed,
            messages=example.messages,
            reference=example.answer,
            match=name,
        )
        for seed, sample in enumerate(heldout_samples(FAMILIES[name], count, range(options.seeds)))
        for number, example in enumerate(sample)
    )
    return Task(name=name, questions=questions, max_tokens=MAX_TOKENS)


def _dealt(name: str, records: Sequence[Referenced], options: TaskOptions, max_tokens: int, source: str) -> Task:
    if len(records) < options.seeds:
        raise DataError(
            f"{source} has too few records for {options.seeds} seeds: {len(records)}. Add some or lower --seeds."
        )
    if options.examples is not None:
        records = records[: options.examples * options.seeds]
    questions = [
        Question(
            task=name,
            number=index // options.seeds,
            seed=index % options.seeds,
            messages=record.messages,
            reference=record.reference,
            match=record.match,
        )
        for index, record in enumerate(records)
    ]
    return Task(name=name, questions=tuple(questions), max_tokens=max_tokens)
