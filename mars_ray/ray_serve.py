"""Put a model into your own Ray Serve application, as an OpenAI-compatible endpoint or as a deployment for others."""

from mars_ray.serve.ray.app import build_deployment, build_openai_app
from mars_ray.serve.ray.mounted_app import MountedApp

__all__ = ["MountedApp", "build_deployment", "build_openai_app"]
