"""The Serve applications of an endpoint's further models, as their manager sees them."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, Protocol

from mars_ray.platform.models.model_settings import AddedModel
from mars_ray.platform.platform_config import PlatformConfig


class ApplicationState(NamedTuple):
    """State of one Serve application."""

    status: Literal["deploying", "running", "failed", "deleting"]
    message: str = ""


class Applications(Protocol):
    """The Serve applications of the endpoint's further models."""

    def states(self) -> Mapping[str, ApplicationState]:
        """Return the state of each application by name."""

    def deploy(self, name: str, config: PlatformConfig, settings: AddedModel) -> None:
        """Begin to deploy the engines of a model. Raises `MarsRayError`."""

    def delete(self, name: str) -> None:
        """Begin to delete an application; its running requests may finish."""

    def set_adapters(self, name: str, adapters: Mapping[str, str]) -> None:
        """Store the adapters of a model, which its engines follow. `name` is the controller of the model."""


def application_prefix(controller: str) -> str:
    """Return the beginning of the names of the applications of the endpoint with this controller."""
    return f"{controller}-model-"
