"""Settings of an endpoint with a platform: those of the core, and what surrounds it.

In:    the parsed YAML.
Out:   frozen settings; unknown names and impossible values raise errors when they are read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mars_ray.openai_api.storage_limits import StorageLimits
from mars_ray.platform.accounts.account_store import audit_folder, open_account_store
from mars_ray.platform.accounts.oidc_settings import OidcSettings
from mars_ray.platform.models.model_settings import Access, AddedModel
from mars_ray.platform.usage.token_prices import TokenPrices
from mars_ray.serve.deploy.model_settings import ModelSettings, absolute_model
from mars_ray.serve.deploy.serve_config import ServeConfig
from mars_ray.storage.location import FILE_URL, is_url


class PlatformConfig(ServeConfig):
    """Settings of an endpoint with accounts, usage, batches and several models."""

    deployments: ClassVar[tuple[str, ...]] = (*ServeConfig.deployments, "Models", "Batches")
    """Also the manager of further models and, with storage, the runner of batches."""
    moved: ClassVar[Mapping[str, str]] = {
        "models_memory_gib": "reserve `memory` in the `ray_actor_options` of each entry of `models`; see docs/models.md"
    }

    access: Access = Field(default_factory=dict)
    models: dict[str, AddedModel] = Field(default_factory=dict)
    """Further models, keyed by the names under which callers request them. Operators can add more while the endpoint
    runs (`mars-ray models add`)."""
    storage: str | None = None
    """Folder or object store that keeps files, batches, accounts and usage when the endpoint ends. Every node must
    reach it. None turns off the routes that need it."""
    storage_limits: StorageLimits = StorageLimits()
    keys: Path | Literal["storage"] | None = None  # type: ignore[assignment]  # wider than in the core
    """File of API keys and accounts (`mars-ray keys add`), which every node must have, or `storage` to keep them in the
    storage. An endpoint without keys and without `oidc` listens on the loopback interface only."""
    oidc: OidcSettings | None = None
    """OpenID Connect provider whose tokens callers may send instead of keys. Limits of accounts are in `keys`."""
    prices: TokenPrices | None = None
    """Prices of tokens, for budgets in money and for reports of usage. None means that usage has no price."""

    @model_validator(mode="after")
    def _models_make_sense(self) -> Self:
        if self.keys == "storage" and self.storage is None:
            raise ValueError("keys are in the storage, but no storage is set; set `storage`, or name a file of keys")
        for name, model in self.models.items():
            self.check_classes(name, model)
        names = self.all_names()
        if unknown := next((name for name in self.access if name not in names), None):
            raise ValueError(f"access: {unknown!r} is neither a model nor an adapter")
        return self

    def all_names(self) -> list[str]:
        """Return the names that callers may request."""
        return super().all_names() + [served for name, model in self.models.items() for served in model.names(name)]

    def check_classes(self, name: str, model: AddedModel) -> None:
        """Raise a `ValueError` if a model lacks a class of the endpoint, because keys may name every class."""
        own = self.class_names
        names = model.class_names
        if "classes" in model.model_fields_set and sorted(names) != sorted(own):
            raise ValueError(f"models.{name}.classes: name the classes of the endpoint: {', '.join(own)}")

    def of_model(self, name: str, model: AddedModel) -> "PlatformConfig":
        """Return the settings of an endpoint whose main model is a further model of this one."""
        assert self.controller, "the controllers of further models are named after that of the main one"
        fields: dict[str, Any] = {field: getattr(model, field) for field in ModelSettings.model_fields}
        if "classes" not in model.model_fields_set:
            fields["classes"] = self.classes
        fields |= {"name": name, "models": {}, "controller": f"{self.controller}:{name}"}
        return self.model_copy(update=fields)

    @property
    def meters_usage(self) -> bool:
        """Whether the endpoint counts usage: if it knows its callers, or has a place to keep the counts."""
        return self.keys is not None or self.oidc is not None or self.storage is not None

    @property
    def knows_callers(self) -> bool:
        """Whether only callers with a key or a token have access."""
        return self.keys is not None or self.oidc is not None

    @property
    def audit_folder(self) -> str | None:
        """Folder or URL of the log of operators' acts in the storage."""
        return audit_folder(self.storage)

    def absolute_paths(self) -> dict[str, Any]:
        """Return the settings that hold paths, with these paths made absolute."""
        paths = super().absolute_paths()
        if self.storage is not None and not is_url(self.storage):
            paths["storage"] = str(Path(self.storage.removeprefix(FILE_URL)).expanduser().absolute())
        if self.models:
            paths["models"] = {
                name: model.model_dump(mode="json", exclude_unset=True) | absolute_model(model)
                for name, model in self.models.items()
            }
        return paths

    def check_keys(self) -> None:
        """Raise a `DataError` or `ConfigError` for keys that cannot be used."""
        if self.keys is not None:
            keys = open_account_store(self.keys, self.storage).read()
            keys.check_classes(self.class_names)
