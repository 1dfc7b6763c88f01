"""Find tasks by name: the questions to ask, each with what judges the answer.

Seed s of a family is another sample of its held-out examples; a file is dealt out to the seeds in turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import islice

from mars_ray.data.prompt_file import Conversation
from mars_ray.data.tasks import FAMILIES
from mars_ray.data.tasks.split import examples
from mars_ray.errors import ConfigError, DataError
from mars_ray.evaluation.tasks.benchmarks import BENCHMARK_TOKENS, BENCHMARKS
from mars_ray.evaluation.tasks.reference_file import Referenced, read_references
from mars_ray.storage.location import AnyPath, check_reachable, locate

ALL_FAMILIES = "families"
EXAMPLES_PER_FAMILY = 100
"""Examples of each family in each sample, by default."""
FAMILY_QUESTIONS = 100_000
"""Questions at most: an evaluation holds all of them in memory."""
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt, and what judges the answer."""

    task: str
    number: int
    """The number within its task and seed, from 0."""
    seed: int
    messages: Conversation
    reference: str
    match: str
    """How an answer is compared with it: a name in `verify.MATCHES`, or "code"."""

    @property
    def name(self) -> str:
        """A name that no other question has."""
        return f"{self.task}/{self.number}/{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Questions of one kind."""

    name: str
    questions: tuple[Question, ...]
    max_tokens: int
    """Tokens of an answer at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """Which questions of the tasks to ask."""

    examples: int | None = None
    """Examples per task and seed; by default `EXAMPLES_PER_FAMILY` of a family, all of a file."""
    seeds: int = 3
    max_tokens: int | None = None
    """Tokens of an answer at most; by default each task has its own number."""
    match: str = "exact"
    """How answers are compared with records of a file that do not say."""
    data: AnyPath | None = None
    """Folder, or its URL, of the benchmarks; families and files do not need it."""
    allow_code_execution: bool = False


def open_tasks(names: Sequence[str], options: TaskOptions) -> tuple[Task, ...]:
    """Return the tasks, in the order of their names. Raises `ConfigError` or `DataError` for what is not usable."""
    for name, value in (("seeds", options.seeds), ("examples", options.examples), ("max_tokens", options.max_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1.")
    wanted = [each for name in names for each in (FAMILIES if name == ALL_FAMILIES else [name])]
    if not wanted:
        raise ConfigError(f"no task is given; choose from {', '.join(_known())}, or give a JSONL file.")
    tasks = [_open(name, options) for name in dict.fromkeys(wanted)]
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
            raise ConfigError("humaneval runs code that the model wrote; say --allow-code-execution to allow that.")
        if options.data is None:
            raise ConfigError(f"{name} is read from a folder that holds {name}/; name it with --data.")
        return _dealt(name, BENCHMARKS[name](options.data), options, BENCHMARK_TOKENS, str(options.data))
    path = locate(name)
    check_reachable(path)
    if not path.is_file():
        close = get_close_matches(name, _known(), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"{name!r} is no task and no file; choose from {', '.join(_known())}.{hint}")
    return _dealt(path.name.split(".")[0] or path.name, read_references(path, options.match), options, MAX_TOKENS, name)


def _known() -> list[str]:
    return [*FAMILIES, ALL_FAMILIES, *BENCHMARKS]


def _family(name: str, options: TaskOptions) -> Task:
    count = options.examples or EXAMPLES_PER_FAMILY
    if count * options.seeds > FAMILY_QUESTIONS:
        raise ConfigError(
            f"{options.seeds} samples of {count:,} examples are more than the {FAMILY_QUESTIONS:,} a family may have. "
            "Lower --examples or --seeds."
        )
    questions: list[Question] = []
    asked: set[str] = set()
    for seed in range(options.seeds):
        # Of some families there are few prompts: a sample leaves out those of the samples before it.
        new = (each for each in examples(FAMILIES[name], "heldout", seed) if each.prompt not in asked)
        sample = list(islice(new, count))
        if len(sample) < count:
            raise ConfigError(
                f"{name} has {len(asked) + len(sample):,} held-out examples, too few for {options.seeds} samples of "
                f"{count:,}. Lower --examples or --seeds."
            )
        asked.update(each.prompt for each in sample)
        questions += (
            Question(
                task=name,
                number=number,
                seed=seed,
                messages=({"role": "user", "content": each.prompt},),
                reference=each.answer,
                match=name,
            )
            for number, each in enumerate(sample)
        )
    return Task(name=name, questions=tuple(questions), max_tokens=MAX_TOKENS)


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
            number=place // options.seeds,
            seed=place % options.seeds,
            messages=record.messages,
            reference=record.reference,
            match=record.match,
        )
        for place, record in enumerate(records)
    ]
    return Task(name=name, questions=tuple(questions), max_tokens=max_tokens)
