"""Ray shell: remove what an endpoint's platform leaves behind when the endpoint is gone."""

from collections.abc import Callable

from ray import serve

from mars_ray.platform.models.applications import application_prefix
from mars_ray.platform.ray.ray_meter import remove_meter
from mars_ray.platform.ray.ray_response_store import remove_response_store


def clean_up(name: str, delete: Callable[[str], None]) -> None:
    """Delete the engines of further models, the stored responses and the meter of the application `name`."""
    further = application_prefix(name)
    for other in [other for other in serve.status().applications if other.startswith(further)]:
        delete(other)
    remove_response_store(name)
    remove_meter(name)
