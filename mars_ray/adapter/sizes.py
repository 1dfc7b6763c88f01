"""Compare the sizes of an adapter's tensor with those it needs."""

from torch import Tensor

from mars_ray.errors import AdapterError


def check_sizes(name: str, tensor: Tensor, needed: tuple[int, ...]) -> None:
    """Raise `AdapterError` unless `tensor`, called `name`, has the shape `needed`."""
    if tuple(tensor.shape) != needed:
        raise AdapterError(
            f"The adapter does not fit the model: its tensor {name} has the shape {tuple(tensor.shape)}; the model "
            f"needs {needed}. Give an adapter that was trained on this model."
        )
