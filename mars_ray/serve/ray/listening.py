"""Each gateway checks where Ray Serve listens: `serve deploy` makes none of the checks of `mars-ray serve` (shell)."""

import os

from mars_ray.errors import ConfigError
from mars_ray.ray_private import serve_http_options
from mars_ray.serve.deploy import front
from mars_ray.serve.deploy.config import ServeConfig, check_exposure


def check_listening(config: ServeConfig) -> None:
    """Raise a `ConfigError` where strangers would be let in, or where callers would not get the TLS asked for."""
    options = serve_http_options()
    check_exposure(os.environ.get(front.HOST) or options.host, config)
    if options.ssl_certfile and has_load_balancer():
        raise ConfigError(
            f"http_options.ssl_certfile has no effect on HAProxy, which callers speak to: set {front.CERTIFICATE} and "
            f"{front.KEY} on every node before `ray start`, and leave it out here."
        )


def has_load_balancer() -> bool:
    """Return whether HAProxy stands in front of the gateways, by the environment Ray Serve reads."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
