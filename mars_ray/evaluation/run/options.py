"""What to evaluate, and how: the options of `evaluate`, plain Python."""

from dataclasses import dataclass, field

from mars_ray.batch.run.options import WorkerOptions
from mars_ray.evaluation.tasks.registry import TaskOptions
from mars_ray.storage.location import AnyPath


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions:
    """What to evaluate, and how."""

    output: AnyPath
    """A folder, here or in a store, that is absent, empty, or holds this very evaluation, which then goes on."""
    tasks: tuple[str, ...]
    """Names of task families or benchmarks, and files of prompts with references."""
    questions: TaskOptions = field(default_factory=TaskOptions)
    """Which questions of the tasks."""
    model: str = "bundled"
    """What `resolve_model` takes: `bundled`, `smollm2`, a folder, a .gguf file or a name on a hub."""
    adapter: str | None = None
    """'smollm2', which comes with the package, a folder, or a name on a hub: one that was trained for the model."""
    modes: tuple[str, ...] = ("ar", "exact", "threshold")
    """Modes to compare; `ar` is always among them."""
    thresholds: tuple[float, ...] = (0.99, 0.95, 0.9, 0.8, 0.6)
    """Thresholds of mode `threshold`."""
    temperature: float = 0.0
    """Temperature of sampling. Above 0 each question has a seed of its own, the same at all settings."""
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    """The processes that decode. Their steps are compiled only where speed is measured: answers would depend on when
    compiling ends."""
