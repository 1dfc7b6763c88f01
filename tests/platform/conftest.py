"""The endpoint of the core's tests, with the platform around it."""

from tests.serve.conftest import bundled, keys, running

__all__ = ["bundled", "keys", "running"]
