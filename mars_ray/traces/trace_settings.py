"""The environment variables that turn traces on, read without loading the OpenTelemetry SDK.

All other variables of OpenTelemetry (headers, timeouts, sampler, resource, queue) are read by the SDK itself.
"""

from collections.abc import Mapping
from importlib.util import find_spec

from mars_ray.errors import ConfigError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"


def traces_are_on(environment: Mapping[str, str]) -> bool:
    """Return whether spans are to be exported: an endpoint is set, and neither the SDK nor the export is turned off.

    Raises `ConfigError` for an exporter or a protocol that is not supported, and if the exporter is not installed.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    if exporter == "none" or not any(environment.get(name, "").strip() for name in ENDPOINTS):
        return False
    if exporter != "otlp":
        raise ConfigError(f"OTEL_TRACES_EXPORTER is {exporter!r}; it must be 'otlp' or 'none'.")
    for name in PROTOCOLS:
        if (protocol := environment.get(name, "").strip() or PROTOCOL) != PROTOCOL:
            raise ConfigError(f"{name} is {protocol!r}; it must be {PROTOCOL!r}, which collectors accept on port 4318.")
    if not _is_installed("opentelemetry.exporter.otlp.proto.http"):
        raise ConfigError(
            f"{next(name for name in ENDPOINTS if environment.get(name))} is set, but the exporter of OpenTelemetry is "
            "not installed. Install mars-ray with the extra 'traces', or unset the variable."
        )
    return True


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above the module is missing
        return False
