"""Generated tasks with exact verifiers, to train tiny models and to judge decoding."""

from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.registry import FAMILIES, verify
from mars_ray.data.tasks.split import Split, examples, mixture, split_of

__all__ = ["FAMILIES", "Family", "Split", "TaskExample", "examples", "mixture", "split_of", "verify"]
