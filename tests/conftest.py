"""Settings of all tests, and their order. The fixtures that they share are in `fixtures.py`."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from mars_ray.installed import HAS_PLATFORM
from tests.store_server import free_port, use_store

# Fixtures are networks that no test changes, and two busy cores keep no deadline.
for profile, examples in {"default": 15, "nightly": 200}.items():
    settings.register_profile(
        profile, max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Without the folder of the platform, the core's tests must pass.
collect_ignore = [] if HAS_PLATFORM else ["platform"]

# `make test` runs two processes on two cores: a thread each for what they start.
os.environ["OMP_NUM_THREADS"] = "1"

# Known before Ray starts, whose workers have the environment of its start; whoever needs the store starts it.
STORE_PORT = free_port()
use_store(STORE_PORT)

# Ray Serve kills a proxy that is not up after three times so long, and gives up after a minute.
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"
# Otherwise, Ray's workers have a lower priority than other work on this machine.
os.environ |= {"RAY_worker_niceness": "0"}


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixtures, but not where pytest-xdist only hands out tests: importing torch would take it seconds."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")


# What is collected stays, so looking through it for garbage would only take time: a fifth of that of collecting.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


class _RayTogether(LoadFileScheduling):  # type: ignore[misc]
    """A file's tests run in one process and share fixtures; so do all files that start Ray: one cluster at a time.

    Files that convert in forks run in one process, too, because the server that forks imports for six seconds.
    """

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        text = (self.config.rootpath / file).read_text()
        return "ray" if "mark.ray" in text else "forks" if "convert_in_fork" in text else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _RayTogether:
    return _RayTogether(config, log)


def _uses_cluster(item: pytest.Item | None) -> bool:
    return isinstance(item, pytest.Function) and "cluster" in item.fixturenames


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with Ray, which takes longest, and there with those that share a cluster. Skip tests that need the platform
    where its folder is gone."""
    for item in items:
        if not HAS_PLATFORM and item.get_closest_marker("platform"):
            item.add_marker(pytest.mark.skip(reason="needs the platform"))
    items.sort(key=lambda item: (item.get_closest_marker("ray") is None, not _uses_cluster(item)))


@pytest.hookimpl(trylast=True)  # what fixtures end on the cluster, they end before
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the cluster before a test that does not share it: it would take time from it, or start another."""
    if _uses_cluster(item) and not _uses_cluster(nextitem):
        import ray

        ray.shutdown()
