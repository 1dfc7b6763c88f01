"""Put a model into your own Ray Serve application, as an OpenAI-compatible endpoint or as a deployment for others."""

from mars_ray.installed import HAS_PLATFORM
from mars_ray.serve.ray.mounted_app import MountedApp

if HAS_PLATFORM:
    from mars_ray.platform.ray.app import build_deployment, build_openai_app
else:
    from mars_ray.serve.ray.app import build_deployment, build_openai_app

__all__ = ["MountedApp", "build_deployment", "build_openai_app"]
