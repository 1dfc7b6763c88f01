"""Generated tasks with exact verifiers, to train tiny models and to judge decoding."""

from mars_ray.data.tasks.family import Family, TaskExample
from mars_ray.data.tasks.registry import FAMILIES, is_right_answer
from mars_ray.data.tasks.split import Split, examples, mixture, split_of

__all__ = ["FAMILIES", "Family", "Split", "TaskExample", "examples", "is_right_answer", "mixture", "split_of"]
