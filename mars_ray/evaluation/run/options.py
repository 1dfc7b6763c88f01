"""Options of `evaluate`."""

from dataclasses import dataclass, field

from mars_ray.batch.run.options import WorkerOptions
from mars_ray.evaluation.tasks.registry import TaskOptions
from mars_ray.storage.location import AnyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """Tasks, model and settings of an evaluation."""

    output: AnyPath
    """Folder, local or in an object store. It must be absent or empty, or hold an earlier run of this evaluation, which
    is then resumed."""
    tasks: tuple[str, ...]
    """Names of task families or benchmarks, or paths of files with prompts and references."""
    questions: TaskOptions = field(default_factory=TaskOptions)
    model: str = "bundled"
    """`bundled`, `smollm2`, a folder, a .gguf file or a name on a hub; see `resolve_model`."""
    adapter: str | None = None
    """Adapter that was trained for the model: 'smollm2', a folder, or a name on a hub."""
    modes: tuple[str, ...] = ("ar", "exact", "threshold")
    """Modes to compare; `ar` is always added."""
    thresholds: tuple[float, ...] = (0.99, 0.95, 0.9, 0.8, 0.6)
    """Thresholds of mode `threshold`."""
    temperature: float = 0.0
    """Sampling temperature. Above 0, each question has its own seed, which is the same in all settings."""
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    """Options of the workers. Compiled steps are used only to measure speed, because otherwise answers would depend on
    when compilation finishes."""
