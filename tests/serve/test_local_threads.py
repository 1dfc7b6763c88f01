"""The threads of engines that have this machine to themselves."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.build_app import build_app

from mars_ray.errors import ModelError
from mars_ray.installed import settings_class
from mars_ray.model import threads as model_threads
from mars_ray.model.resolve import resolve_model
from mars_ray.model.threads import suitable_threads
from mars_ray.serve.deploy.deploy_file import read_deploy_file, share_cpus
from mars_ray.serve.deploy.serve_config import ServeConfig, parse_config
from mars_ray.serve.ray.app import build_openai_app

KIND = settings_class()

CPUS = 8


@pytest.fixture(autouse=True)
def large_model_on_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 8 CPUs, where a model of 3 million parameters is large."""
    monkeypatch.setattr(model_threads, "usable_cpus", lambda: CPUS)
    monkeypatch.setattr(model_threads, "PARAMETERS_PER_THREAD", 1_000_000)


def threads(engine: dict[str, Any] | None = None) -> int | None:
    """The threads that a file with this deployment of engines gives them."""
    fields = read_deploy_file(KIND, None)
    [application] = fields["applications"]
    deployments = [{"name": "Gateway", "num_replicas": 3}] + ([{"name": "Engine"} | engine] if engine else [])
    shared = share_cpus(KIND, fields | {"applications": [application | {"deployments": deployments}]})
    return parse_config(KIND, shared["applications"][0]["args"]).engine.threads


def test_one_engine_has_every_cpu() -> None:
    assert threads() == CPUS


def test_engines_share_the_cpus_whether_they_all_run_or_may_come() -> None:
    assert threads({"num_replicas": 3}) == 2
    assert threads({"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}}) == 2
    assert threads({"num_replicas": 100}) == 1


def test_what_the_file_says_stays() -> None:
    assert parse_config(KIND, {"engine": {"threads": 3}}).engine_spec(Path(), cpus=8.0).threads == 3
    assert threads({"ray_actor_options": {"num_cpus": 2}}) is None
    assert threads({"num_replicas": "auto"}) is None


def test_a_model_that_one_thread_is_enough_for_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_threads, "PARAMETERS_PER_THREAD", 50_000_000)
    assert threads() == 1


def test_an_option_of_the_command_line_says_how_many() -> None:
    [application] = share_cpus(KIND, read_deploy_file(KIND, None, engine={"threads": 5}))["applications"]
    assert parse_config(KIND, application["args"]).engine.threads == 5


def test_a_replica_asks_ray_for_the_cpus_its_threads_take_and_has_the_threads_ray_set_aside() -> None:
    engine = next(
        each
        for each in build_app(build_openai_app({"engine": {"threads": 3}}), name="mars").deployments
        if each.name == "Engine"
    )
    assert engine.ray_actor_options["num_cpus"] == 3
    assert ServeConfig().engine_spec(Path(), cpus=4.0).threads == 4
    assert ServeConfig().engine_spec(Path(), cpus=0.0).threads == 1


def test_a_model_with_damaged_weights_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    shutil.copytree(resolve_model("bundled"), broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ModelError, match="not a complete safetensors file"):
        share_cpus(KIND, read_deploy_file(KIND, None, model=str(broken)))


def test_threads_suit_the_size_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suitable_threads(3_400_000) == 4
    monkeypatch.setattr(model_threads, "PARAMETERS_PER_THREAD", 50_000_000)
    assert suitable_threads(3_400_000) == 1
