"""Options of `evaluate`."""

from dataclasses import dataclass, field

from mars_ray.batch.run.options import WorkerOptions
from mars_ray.engine.checked_fields import Numbers, Texts, check_fields
from mars_ray.evaluation.tasks.registry import TaskOptions
from mars_ray.model.resolve import Name
from mars_ray.storage.location import PathOrUrl


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
    """Adapter that was trained for the model: 'smollm2', a folder, or a name on a hub."""
    modes: Texts = ("ar", "exact", "threshold")
    """Modes to compare; `ar` is always added."""
    thresholds: Numbers = (0.99, 0.95, 0.9, 0.8, 0.6)
    """Thresholds of mode `threshold`."""
    temperature: float = 0.0
    """Sampling temperature. Above 0, each question has its own seed, which is the same in all settings."""
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    """Options of the workers."""

    def __post_init__(self) -> None:
        check_fields(self)
