"""The registry of models and the manager that starts and ends engines, without a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.errors import ConfigError, MarsRayError, ServeError, UnknownNameError
from mars_ray.platform.models.manager import GATEWAY_S, ApplicationState, ModelManager
from mars_ray.platform.models.registry import Directory, Registry, ServedModel
from mars_ray.platform.platform_config import AddedModel, PlatformConfig
from mars_ray.serve.deploy.serve_config import parse_config
from mars_ray.storage.audit_log import AuditLog
from mars_ray.storage.document import VersionedDocument

ONE = AddedModel(model="smollm2")
TWO = AddedModel(model="bundled")


def config_of(**fields: Any) -> PlatformConfig:
    return parse_config(PlatformConfig, {"controller": "mars"} | fields)


@dataclass
class Cluster:
    """Serve's applications as the manager sees them: they take a while to start and to end."""

    applications: dict[str, ApplicationState] = field(default_factory=dict)
    adapters: dict[str, Mapping[str, str]] = field(default_factory=dict)
    broken: str = ""
    now_s: float = 0.0

    def states(self) -> dict[str, ApplicationState]:
        return dict(self.applications)

    def deploy(self, name: str, config: PlatformConfig, settings: AddedModel) -> None:
        if self.broken == settings.model:
            raise ServeError("no such option")
        assert name not in self.applications
        self.applications[name] = ApplicationState("deploying")

    def delete(self, name: str) -> None:
        self.applications[name] = ApplicationState("deleting")

    def set_adapters(self, name: str, adapters: Mapping[str, str]) -> None:
        self.adapters[name] = dict(adapters)

    def settle(self) -> None:
        for name, state in list(self.applications.items()):
            if state.status == "deploying":
                self.applications[name] = ApplicationState("running")
            if state.status == "deleting":
                del self.applications[name]


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def manager_of(cluster: Cluster, folder: Path, **fields: Any) -> ModelManager:
    return ModelManager(
        config_of(**fields),
        VersionedDocument(folder / "models"),
        cluster,
        AuditLog(None),
        clock=lambda: cluster.now_s,
    )


def add(manager: ModelManager, name: str, settings: AddedModel = ONE) -> None:
    manager.change("key:ada", "model.added", name, "with_model", name, settings)


def newest(manager: ModelManager) -> Directory:
    directory = manager.follow("gateway", 0)
    assert directory
    return directory


def run(manager: ModelManager, cluster: Cluster, steps: int = 4) -> Directory:
    """Let some seconds pass, in which one gateway follows, and return its directory."""
    for _ in range(steps):
        cluster.now_s += GATEWAY_S / 2
        manager.follow("gateway", newest(manager).revision)
        manager.step()
        cluster.settle()
    return newest(manager)


def states(directory: Directory) -> dict[str, str]:
    return {model.name: model.state for model in directory.models}


def only(directory: Directory) -> ServedModel:
    [model] = directory.models
    return model


# The registry.


def test_names_of_models_and_adapters_are_unique_over_the_whole_endpoint() -> None:
    registry = Registry.of_config(config_of(adapters={"json": "smollm2"}, served_model_names=["gpt"]))
    registry = registry.with_model("small", AddedModel(model="smollm2", adapters={"terse": "smollm2"}))
    for name in ("gpt", "json", "terse"):
        with pytest.raises(ConfigError, match="already"):
            registry.with_model(name, ONE)
    for name in ("gpt", "terse", "small", "bundled"):
        with pytest.raises(ConfigError, match="already"):
            registry.with_adapter("bundled", name, "smollm2", None)
    with pytest.raises(ConfigError, match="main model"):
        registry.with_model("bundled", ONE)
    with pytest.raises(ConfigError, match="main model"):
        registry.without("gpt")
    with pytest.raises(UnknownNameError, match=r"'smal'. Did you mean 'small'\?$"):
        registry.without("smal")


changes = st.lists(
    st.one_of(
        st.tuples(st.just("with_model"), st.sampled_from("ab"), st.sampled_from([ONE, TWO])),
        st.tuples(
            st.just("with_adapter"),
            st.sampled_from(["a", "b", "bundled"]),
            st.sampled_from("xyab"),
            st.just("f"),
            st.none(),
        ),
        st.tuples(st.just("without"), st.sampled_from("abxy")),
        st.tuples(st.sampled_from(["promoted", "taken_back"]), st.sampled_from("ab"), st.just("")),
    )
)


@given(changes)
def test_any_changes_leave_unique_names_and_numbers_and_survive_their_file(made: list[tuple[Any, ...]]) -> None:
    registry = Registry.of_config(config_of())
    for method, *args in made:
        before = registry
        if method in ("promoted", "taken_back") and not (args[0] in registry.models and registry.models[args[0]].new):
            continue
        try:
            registry = getattr(registry, method)(*args)
        except ConfigError:
            assert registry is before
        names = list(registry.names())
        models = registry.models.values()
        numbers = [model.current.number for model in models]
        numbers += [model.new.number for model in models if model.new]
        assert len(names) == len(set(names))
        assert len(numbers) == len(set(numbers)) and all(number < registry.next_number for number in numbers)
        assert Registry.model_validate_json(registry.model_dump_json()) == registry
        assert set(registry.adapters) == {"bundled", *registry.models}


def test_models_added_at_run_time_survive_a_restart_and_a_changed_config_takes_effect(
    tmp_path: Path, cluster: Cluster
) -> None:
    entry = {"fast": {"model": "smollm2"}}
    manager = manager_of(cluster, tmp_path, models=entry)
    add(manager, "small")
    again = manager_of(cluster, tmp_path, models=entry)
    assert set(again.registry.models) == {"fast", "small"}
    kept = again.registry.models["fast"].current.number
    changed = manager_of(cluster, tmp_path, models=entry | {"more": {"model": "smollm2"}})
    assert set(changed.registry.models) == {"fast", "more"}
    assert changed.registry.models["fast"].current.number == kept, "the engines of an unchanged entry go on"


def test_classes_that_a_model_leaves_out_are_the_endpoints_also_after_a_restart(
    tmp_path: Path, cluster: Cluster
) -> None:
    classes = [{"name": "gold", "floor": 0.5}]
    add(manager_of(cluster, tmp_path, classes=classes), "small")
    again = manager_of(cluster, tmp_path, classes=classes)
    model = only(run(again, cluster))
    assert model.state == "ready" and [each.name for each in model.config.classes] == ["gold"]


def test_a_model_that_lacks_a_class_of_the_endpoint_cannot_be_added(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path, classes=[{"name": "gold"}, {"name": "batch"}])
    with pytest.raises(ConfigError, match="name the classes of the endpoint"):
        add(manager, "small", parse_config(AddedModel, {"model": "smollm2", "classes": [{"name": "gold"}]}))


def test_a_threshold_below_a_floor_that_the_model_takes_from_the_endpoint_is_refused(
    tmp_path: Path, cluster: Cluster
) -> None:
    classes = [{"name": "gold", "floor": 0.8}, {"name": "batch", "floor": 0.5}]
    low = {"model": "smollm2", "threshold": 0.7}
    said = r"models\.small\.threshold is 0\.7, below the floor 0\.8 of class gold"
    with pytest.raises(ConfigError, match=said):
        config_of(classes=classes, models={"small": low})
    manager = manager_of(cluster, tmp_path, classes=classes)
    with pytest.raises(ConfigError, match=said):
        add(manager, "small", parse_config(AddedModel, low))
    own = [{"name": "gold", "floor": 0.6}, {"name": "batch"}]
    add(manager, "small", parse_config(AddedModel, low | {"classes": own}))


def test_a_model_is_refused_at_once_if_no_calibration_says_whether_it_keeps_its_limit_on_lost_accuracy(
    tmp_path: Path, cluster: Cluster
) -> None:
    manager = manager_of(cluster, tmp_path, classes=[{"name": "gold", "floor": 0.6}])
    uncalibrated = tmp_path / "uncalibrated"
    uncalibrated.mkdir()
    control = {"max_accuracy_loss": 0.005}
    refused = r"max_accuracy_loss is 0\.005, but no calibration .* class gold may fall to its floor 0\.6"
    with pytest.raises(ConfigError, match=refused):
        add(manager, "small", parse_config(AddedModel, {"model": str(uncalibrated), "control": control}))
    assert not manager.registry.models
    add(manager, "small", parse_config(AddedModel, {"model": "bundled", "control": control}))


def test_a_stored_model_whose_threshold_a_floor_has_passed_is_not_deployed_and_says_why(
    tmp_path: Path, cluster: Cluster
) -> None:
    add(manager_of(cluster, tmp_path), "small", AddedModel(model="smollm2", threshold=0.7))
    restarted = Cluster()
    manager = manager_of(restarted, tmp_path, classes=[{"name": "gold", "floor": 0.8}])
    add(manager, "good")
    directory = run(manager, restarted)
    assert states(directory) == {"small": "failed", "good": "ready"}
    assert "threshold is 0.7, below the floor 0.8 of class gold" in directory.models[0].reason
    assert set(restarted.applications) == {directory.models[1].application}


def test_a_config_with_two_equal_names_an_unknown_class_or_access_to_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="two models or adapters"):
        config_of(models={"a": {"model": "smollm2", "adapters": {"a": "smollm2"}}})
    with pytest.raises(ConfigError, match="name the classes of the endpoint"):
        config_of(models={"a": {"model": "smollm2", "classes": [{"name": "gold"}]}})
    with pytest.raises(ConfigError, match="neither a model nor an adapter"):
        config_of(access={"nothing": ["acme"]})
    with pytest.raises(ConfigError, match=r"models\.a\.access: 'b' is no name of this model .*; name a"):
        config_of(models={"a": {"model": "smollm2", "access": {"b": ["acme"]}}})
    with pytest.raises(ConfigError, match=r"models\.a: unknown field 'modle'"):
        config_of(models={"a": {"modle": "smollm2"}})
    with pytest.raises(ConfigError, match="below min_replicas"):
        config_of(models={"a": {"model": "smollm2", "min_replicas": 3, "max_replicas": 2}})


def test_a_new_version_may_say_who_uses_an_adapter_that_was_added_meanwhile() -> None:
    registry = Registry.of_config(config_of()).with_model("small", ONE).with_adapter("small", "terse", "two", ("acme",))
    registry.with_model("small", AddedModel(model="smollm2", access={"terse": ("acme",)}))
    with pytest.raises(ConfigError, match="'other' is no name of this model"):
        registry.with_model("small", AddedModel(model="smollm2", access={"other": ("acme",)}))


def test_a_further_model_has_the_settings_of_the_endpoint_but_for_its_own() -> None:
    classes = [{"name": "standard", "floor": 0.5}, {"name": "batch", "floor": 0.2}]
    config = config_of(
        classes=classes, limits={"output_tokens": 7}, models={"a": {"model": "smollm2", "threshold": 0.97}}
    )
    own = config.of_model("a", config.models["a"])
    assert (own.model, own.model_name, own.threshold, own.controller) == ("smollm2", "a", 0.97, "mars:a")
    assert (own.limits.output_tokens, own.classes) == (7, config.classes)


# The manager.


def test_a_model_is_offered_once_its_engines_run_and_deleted_once_no_gateway_uses_it(
    tmp_path: Path, cluster: Cluster
) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "small")
    assert states(newest(manager)) == {"small": "loading"}
    directory = run(manager, cluster)
    model = only(directory)
    assert model.state == "ready" and cluster.applications == {model.application: ApplicationState("running")}
    manager.change("key:ada", "model.removed", "small", "without", "small")
    for _ in range(8):
        manager.follow("gateway", directory.revision)  # it has not taken the new directory
        manager.step()
        assert model.application in cluster.applications
    run(manager, cluster)
    assert not cluster.applications


def test_a_gateway_that_is_gone_does_not_keep_engines(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "small")
    directory = run(manager, cluster)
    manager.follow("dead", directory.revision)
    manager.change("key:ada", "model.removed", "small", "without", "small")
    run(manager, cluster, steps=8)
    assert not cluster.applications


def test_a_manager_that_was_busy_takes_no_gateway_for_dead(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "small")
    directory = run(manager, cluster)
    manager.follow("other", directory.revision)
    cluster.now_s += GATEWAY_S + 1  # such as a slow storage takes
    manager.change("key:ada", "model.removed", "small", "without", "small")
    assert set(cluster.applications.values()) == {ApplicationState("running")}
    run(manager, cluster, steps=8)
    assert not cluster.applications


def test_an_adapter_that_stays_with_a_new_version_stays_private() -> None:
    settings = AddedModel(model="smollm2", adapters={"fast": "smollm2"}, access={"fast": ("acme",), "small": ("acme",)})
    registry = Registry.of_config(config_of(models={"small": settings.model_dump()}))
    promoted = registry.with_model("small", ONE).promoted("small", "")
    assert (dict(promoted.access), "fast" in promoted.adapters["small"]) == ({"fast": ("acme",)}, True)


def test_names_of_a_version_that_starts_are_taken() -> None:
    registry = Registry.of_config(config_of()).with_model("small", ONE)
    new = AddedModel(model="smollm2", adapters={"x": "smollm2"}, served_model_names=["y"])
    starting = registry.with_model("small", new)
    for name in ("x", "y"):
        with pytest.raises(ConfigError, match=f"'{name}' names a model or adapter already"):
            starting.with_adapter("bundled", name, "smollm2", None)
    assert starting.with_model("small", new).promoted("small", "").adapters["small"] == {"x": "smollm2"}


def test_a_new_version_takes_over_when_it_is_ready_and_the_old_one_answers_until_then(
    tmp_path: Path, cluster: Cluster
) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "small")
    old = only(run(manager, cluster))
    add(manager, "small", TWO)
    between = only(newest(manager))
    assert (between.state, between.application, between.new_number) == ("ready", old.application, old.number + 1)
    new = only(run(manager, cluster))
    assert (new.state, new.number, new.config.model) == ("ready", old.number + 1, "bundled")
    assert set(cluster.applications) == {new.application}


def test_of_two_new_versions_the_last_one_takes_over(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "small")
    run(manager, cluster)
    add(manager, "small", TWO)
    add(manager, "small", AddedModel(model="smollm2", threshold=0.97))
    new = only(run(manager, cluster))
    assert (new.state, new.number, new.config.threshold) == ("ready", 3, 0.97)
    assert set(cluster.applications) == {new.application}


def test_a_version_that_cannot_start_is_taken_back_and_the_old_one_goes_on(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "small")
    run(manager, cluster)
    cluster.broken = "bundled"
    add(manager, "small", TWO)
    model = only(run(manager, cluster))
    assert (model.state, model.new_number) == ("ready", None)
    assert "taken back: no such option" in model.reason


def test_a_model_that_cannot_start_says_why_and_harms_no_other(tmp_path: Path, cluster: Cluster) -> None:
    cluster.broken = "bundled"
    manager = manager_of(cluster, tmp_path)
    add(manager, "bad", TWO)
    add(manager, "good")
    directory = run(manager, cluster)
    assert states(directory) == {"bad": "failed", "good": "ready"}
    assert directory.models[0].reason == "no such option"


def test_a_manager_that_restarts_changes_no_application(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "small")
    before = run(manager, cluster)
    again = manager_of(cluster, tmp_path)
    after = run(again, cluster)
    assert only(after) == only(before) and only(after).state == "ready"
    assert after.revision > before.revision


def test_a_change_that_cannot_be_stored_changes_nothing(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path)
    (tmp_path / "models").rename(tmp_path / "gone")
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(MarsRayError):
        add(manager, "small")
    assert not manager.registry.models and not cluster.applications


def test_while_the_storage_is_away_a_new_version_waits_and_other_models_go_on(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "a")
    run(manager, cluster)
    add(manager, "a", TWO)
    add(manager, "b")
    (tmp_path / "models").rename(tmp_path / "gone")
    (tmp_path / "models").write_text("a file where the folder should be")
    directory = run(manager, cluster)
    assert states(directory) == {"a": "ready", "b": "ready"}
    assert directory.models[0].config.model == "smollm2", "what is not stored is not published"
    (tmp_path / "models").unlink()
    (tmp_path / "gone").rename(tmp_path / "models")
    assert run(manager, cluster).models[0].config.model == "bundled"


def test_adapters_reach_the_engines_of_their_model_alone(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path, adapters={"json": "one"})
    add(manager, "small")
    manager.change("key:ada", "adapter.added", "terse", "with_adapter", "small", "terse", "two", ("acme",))
    assert cluster.adapters == {"mars": {"json": "one"}, "mars:small": {"terse": "two"}}
    directory = run(manager, cluster)
    assert directory.access == {"terse": ("acme",)}
    manager.change("key:ada", "model.removed", "terse", "without", "terse")
    assert cluster.adapters["mars:small"] == {}
