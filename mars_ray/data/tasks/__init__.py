"""Generated tasks with exact verifiers, for training tiny models and evaluating decoding."""

from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.registry import FAMILIES, is_right_answer
from mars_ray.data.tasks.split import Split, examples, mixture, split_of

__all__ = ["FAMILIES", "Family", "Split", "TaskExample", "examples", "is_right_answer", "mixture", "split_of"]
