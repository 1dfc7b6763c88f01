"""Directory of an endpoint's models, which gateways follow."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mars_ray.platform.platform_config import PlatformConfig

ModelState = Literal["ready", "loading", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedVersion:
    """A version of a model whose engines run."""

    number: int
    application: str
    """Name of the Serve application of its engines."""
    config: PlatformConfig
    """Settings of an endpoint that has this model alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A further model of an endpoint."""

    name: str
    served_names: tuple[str, ...]
    state: ModelState
    reason: str = ""
    """Why the model is not ready, or what became of its last new version."""
    number: int
    """Number of the present version."""
    new_number: int | None = None
    """Number of the new version, which starts and then takes over."""
    version: ServedVersion | None = None
    """The present version; None unless the model is ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """All models and adapters of an endpoint at one moment."""

    revision: int = 0
    """Rises with every change; 0 before the first directory has come."""
    models: tuple[ServedModel, ...] = ()
    adapters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the adapters of each model, the main one included."""
    access: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Accounts that may use a model or an adapter, by name. Names without an entry are open to all."""

    def allows(self, name: str, account: str, model: str) -> bool:
        """Return whether an account may use a model or an adapter.

        `model` is the model if `name` is one of its further names, which have its accounts unless they have their own;
        otherwise it equals `name`.
        """
        allowed = self.access.get(name, self.access.get(model))
        return allowed is None or account in allowed
