"""Settings of an endpoint with a platform: those of the core, and what surrounds it.

In:    the parsed YAML.
Out:   frozen settings; unknown names and impossible values raise errors when they are read.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, model_validator

from mars_ray.platform.accounts.account_store import audit_folder, open_account_store
from mars_ray.platform.batches.protocol import StorageLimits
from mars_ray.platform.usage.usage_rows import TokenPrices
from mars_ray.serve.deploy.model_settings import ModelSettings, absolute_model
from mars_ray.serve.deploy.serve_config import LOOPBACK, ServeConfig
from mars_ray.storage.location import FILE_URL, is_url

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""Signature algorithms. All are asymmetric, because a symmetric key that checks tokens can also make them."""
ClaimName = str
"""Name of a claim. Dots lead into objects, as in `realm_access.roles`."""
Access = dict[str, tuple[str, ...]]
"""Accounts that may use a model or an adapter, keyed by its name. For other accounts it does not exist. Names without
an entry are open to all callers."""


class OidcClaims(BaseModel, extra="forbid", frozen=True):
    """Claims of a token from which account, class and role follow. A claim may hold a text or a list of texts."""

    account: ClaimName = "sub"
    """Claim with the name of the account. Name one that users cannot choose, because it decides whose responses and
    limits they share."""
    service_class: ClaimName | None = None
    """Claim with the class of service; None means the class of the account, else the first class."""
    role: ClaimName | None = None
    """Claim with the role; None means that no token may operate."""
    operate: str = "operate"
    """Text in the claim `role` with which a token may operate."""


class OidcSettings(BaseModel, extra="forbid", frozen=True):
    """A provider whose tokens the endpoint accepts. The gateways call out to it, and only to it."""

    issuer: str
    """URL of the provider, exactly as in the claim `iss`."""
    audience: str = Field(min_length=1)
    """Text that the claim `aud` must contain, usually the id of this endpoint at the provider."""
    jwks_url: str | None = None
    """URL of the provider's public keys. None finds it at `ISSUER/.well-known/openid-configuration`."""
    algorithms: tuple[Algorithm, ...] = Field(("RS256", "ES256"), min_length=1)
    claims: OidcClaims = OidcClaims()
    leeway_s: float = Field(30, ge=0, le=300)
    """Seconds by which the clocks of the provider and of this machine may differ."""

    @model_validator(mode="after")
    def _urls_are_safe(self) -> Self:
        for name, url in (("issuer", self.issuer), ("jwks_url", self.jwks_url)):
            if url is not None and not is_safe(url):
                raise ValueError(f"{name} is {url!r}, must be an https:// URL (http:// for this machine only)")
        return self


def is_safe(url: str) -> bool:
    """Return whether the connection to a URL's host is encrypted, or stays on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and host in LOOPBACK))


class AddedModel(ModelSettings):
    """Settings of a further model of an endpoint, whose engines start and end while the endpoint runs."""

    model: str
    """Name of the model, as for the main model. Classes of service without a setting keep that of the endpoint."""
    access: Access = Field(default_factory=dict)
    min_replicas: int = Field(1, ge=0, le=1000)
    """Minimum number of engines. At 0, the last engine ends after `downscale_to_zero_delay_s` without a request, and
    the next request starts one."""
    max_replicas: int | None = Field(None, ge=1, le=1000)
    """Maximum number of engines under load; None means `min_replicas`, at least 1."""
    downscale_to_zero_delay_s: float = Field(600, ge=0)
    """Seconds without a request after which the last engine ends, with `min_replicas: 0`."""
    ray_actor_options: dict[str, Any] = Field(default_factory=dict)
    """Resources of each engine in Ray, such as `{num_gpus: 1}`. By default an engine reserves as many CPUs as
    `engine.threads` says, and none without that setting, because the main model may have them all."""

    @model_validator(mode="after")
    def _replicas_make_sense(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is {self.max_replicas}, below min_replicas, {self.min_replicas}")
        return self

    def check_access(self, name: str, also: Iterable[str] = ()) -> None:
        """Raise a `ValueError` if `access` names what is neither this model, called `name`, nor one of its adapters.

        `also` are adapters that were added while the endpoint runs.
        """
        names = [*self.names(name), *also]
        if unknown := next(iter(set(self.access).difference(names)), None):
            raise ValueError(
                f"models.{name}.access: {unknown!r} is no name of this model or of its adapters, so all may use them; "
                f"name {', '.join(names)}"
            )


class PlatformConfig(ServeConfig):
    """Settings of an endpoint with accounts, usage, batches and several models."""

    deployments: ClassVar[tuple[str, ...]] = (*ServeConfig.deployments, "Models", "Batches")
    """Also the manager of further models and, with storage, the runner of batches."""

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
            model.check_access(name)
        names = self.all_names()
        if unknown := next((name for name in self.access if name not in names), None):
            raise ValueError(f"access: {unknown!r} is neither a model nor an adapter")
        return self

    def all_names(self) -> list[str]:
        """Return the names that callers may request."""
        return super().all_names() + [served for name, model in self.models.items() for served in model.names(name)]

    def check_classes(self, name: str, model: AddedModel) -> None:
        """Raise a `ValueError` if a model lacks a class of the endpoint, because keys may name every class.

        Also raises it if a class that the model takes from the endpoint has a floor above the model's threshold.
        """
        own = self.class_names
        if "classes" not in model.model_fields_set:
            for service_class in self.classes:
                if service_class.floor is not None and service_class.floor > model.threshold:
                    raise ValueError(
                        f"models.{name}.threshold is {model.threshold:g}, below the floor {service_class.floor:g} of "
                        f"class {service_class.name}; raise the threshold, or set classes with lower floors for the "
                        "model"
                    )
        elif sorted(model.class_names) != sorted(own):
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
        return self.knows_callers or self.storage is not None

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
