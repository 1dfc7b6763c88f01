"""The registry of models, canaries and the manager that starts and ends engines, without a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_ray.errors import ConfigError, MarsRayError, ServeError, UnknownNameError
from mars_ray.platform.models.applications import ApplicationState
from mars_ray.platform.models.canary import FAILURES, CanaryJudge, CanaryReport
from mars_ray.platform.models.directory import Directory, ServedModel
from mars_ray.platform.models.manager import GATEWAY_S, GIB, ModelManager
from mars_ray.platform.models.model_settings import AddedModel
from mars_ray.platform.models.registry import Canary, Registry
from mars_ray.platform.platform_config import PlatformConfig
from mars_ray.serve.deploy.serve_config import parse_config
from mars_ray.storage.audit_log import AuditLog
from mars_ray.storage.document import VersionedDocument

ONE = AddedModel(model="smollm2")
TWO = AddedModel(model="bundled")
AT_ONCE = Canary()


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
        weight_bytes=lambda model: GIB if model == "smollm2" else 2 * GIB,
        clock=lambda: cluster.now_s,
    )


def add(manager: ModelManager, name: str, settings: AddedModel = ONE, canary: Canary = AT_ONCE) -> None:
    manager.change("key:ada", "model.added", name, "with_model", name, settings, canary)


def run(
    manager: ModelManager, cluster: Cluster, idle_s: Mapping[str, float] | None = None, steps: int = 4
) -> Directory:
    """Let some seconds pass, in which one gateway follows, and return its directory."""
    directory = manager.describe()
    for _ in range(steps):
        cluster.now_s += GATEWAY_S / 2
        directory = manager.follow("gateway", directory.revision, idle_s or {}) or directory
        manager.step()
        cluster.settle()
    return manager.follow("gateway", 0, idle_s or {}) or directory


def states(directory: Directory) -> dict[str, str]:
    return {model.name: model.state for model in directory.models}


def only(directory: Directory) -> ServedModel:
    [model] = directory.models
    return model


# The registry.


def test_names_of_models_and_adapters_are_unique_over_the_whole_endpoint() -> None:
    registry = Registry.of_config(config_of(adapters={"json": "smollm2"}, served_model_names=["gpt"]))
    registry = registry.with_model("small", AddedModel(model="smollm2", adapters={"terse": "smollm2"}), AT_ONCE)
    for name in ("gpt", "json", "terse"):
        with pytest.raises(ConfigError, match="already"):
            registry.with_model(name, ONE, AT_ONCE)
    for name in ("gpt", "terse", "small", "bundled"):
        with pytest.raises(ConfigError, match="already"):
            registry.with_adapter("bundled", name, "smollm2", None)
    with pytest.raises(ConfigError, match="main model"):
        registry.with_model("bundled", ONE, AT_ONCE)
    with pytest.raises(ConfigError, match="main model"):
        registry.without("gpt")
    with pytest.raises(UnknownNameError, match="Did you mean 'small'"):
        registry.without("smal")


changes = st.lists(
    st.one_of(
        st.tuples(st.just("with_model"), st.sampled_from("ab"), st.sampled_from([ONE, TWO]), st.just(AT_ONCE)),
        st.tuples(
            st.just("with_adapter"),
            st.sampled_from(["a", "b", "bundled"]),
            st.sampled_from("xyab"),
            st.just("f"),
            st.none(),
        ),
        st.tuples(st.just("without"), st.sampled_from("abxy")),
        st.tuples(st.just("promoted"), st.sampled_from("ab"), st.just("")),
        st.tuples(st.just("taken_back"), st.sampled_from("ab"), st.just("")),
    )
)


@given(changes)
def test_any_changes_leave_unique_names_and_numbers_and_survive_their_file(made: list[tuple[Any, ...]]) -> None:
    registry = Registry.of_config(config_of())
    for method, *args in made:
        before = registry
        try:
            registry = getattr(registry, method)(*args)
        except ConfigError:
            assert registry is before
        names = list(registry.names())
        models = registry.models.values()
        numbers = [model.current.number for model in models]
        numbers += [model.candidate.version.number for model in models if model.candidate]
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
    [version] = only(run(again, cluster)).versions
    assert [each.name for each in version.config.classes] == ["gold"]


def test_a_config_with_two_equal_names_an_unknown_class_or_access_to_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="two models or adapters"):
        config_of(models={"a": {"model": "smollm2", "adapters": {"a": "smollm2"}}})
    with pytest.raises(ConfigError, match="name the classes of the endpoint"):
        config_of(models={"a": {"model": "smollm2", "classes": [{"name": "gold"}]}})
    with pytest.raises(ConfigError, match="neither a model nor an adapter"):
        config_of(access={"nothing": ["acme"]})
    with pytest.raises(ConfigError, match=r"models\.a: unknown field 'modle'"):
        config_of(models={"a": {"modle": "smollm2"}})
    with pytest.raises(ConfigError, match="below min_replicas"):
        config_of(models={"a": {"model": "smollm2", "min_replicas": 3, "max_replicas": 2}})


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
    assert states(manager.describe()) == {"small": "loading"}
    directory = run(manager, cluster)
    [version] = only(directory).versions
    assert cluster.applications == {version.application: ApplicationState("running")}
    manager.change("key:ada", "model.removed", "small", "without", "small")
    for _ in range(8):
        manager.follow("gateway", directory.revision, {})  # it has not taken the new directory
        manager.step()
        assert version.application in cluster.applications
    run(manager, cluster)
    assert not cluster.applications


def test_a_gateway_that_is_gone_does_not_keep_engines(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "small")
    directory = run(manager, cluster)
    manager.follow("dead", directory.revision, {})
    manager.change("key:ada", "model.removed", "small", "without", "small")
    run(manager, cluster, steps=8)
    assert not cluster.applications


def test_a_new_version_takes_over_when_it_is_ready_and_the_old_one_answers_until_then(
    tmp_path: Path, cluster: Cluster
) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "small")
    old = only(run(manager, cluster)).versions[0]
    add(manager, "small", TWO)
    between = manager.follow("gateway", 0, {})
    assert between and [each.number for each in only(between).versions] == [old.number]
    directory = run(manager, cluster)
    [new] = only(directory).versions
    assert (new.number, new.share, new.config.model) == (old.number + 1, 1.0, "bundled")
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


def test_an_idle_model_sleeps_and_a_request_wakes_it(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "small", AddedModel(model="smollm2", sleep_after_s=100))
    assert states(run(manager, cluster, {"small": 0}, steps=40)) == {"small": "ready"}
    directory = run(manager, cluster, steps=25)
    assert states(directory) == {"small": "asleep"} and not cluster.applications
    manager.wake("small")
    assert states(manager.describe()) == {"small": "loading"}
    assert states(run(manager, cluster)) == {"small": "ready"}


def test_the_model_used_longest_ago_sleeps_when_another_needs_its_memory(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path, models_memory_gib=2)
    for name in ("a", "b"):
        add(manager, name)
    run(manager, cluster, {"a": 0, "b": 0})
    add(manager, "c")
    assert states(run(manager, cluster, {"a": 0, "b": 0}))["c"] == "loading", "nobody sleeps while it is used"
    run(manager, cluster, {"a": 0})
    assert states(run(manager, cluster, {"a": 0}, steps=8)) == {"a": "ready", "b": "asleep", "c": "ready"}
    add(manager, "d", AddedModel(model="bundled", min_replicas=2))
    served = {model.name: model for model in run(manager, cluster, {}).models}
    assert served["d"].state == "failed" and "models_memory_gib is 2" in served["d"].reason
    assert (served["a"].state, served["c"].state) == ("ready", "ready")


steps = st.lists(
    st.tuples(st.sampled_from(["add", "remove", "wake", "use", "pass"]), st.sampled_from("abc")), max_size=30
)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_the_weights_of_running_models_never_exceed_the_bound(taken: list[tuple[str, str]]) -> None:
    cluster = Cluster()
    with TemporaryDirectory() as folder:
        manager = manager_of(cluster, Path(folder), models_memory_gib=2)
        for action, name in taken:
            try:
                if action == "add":
                    add(manager, name)
                elif action == "remove":
                    manager.change("key:ada", "model.removed", name, "without", name)
                elif action == "wake":
                    manager.wake(name)
            except ConfigError:
                pass
            run(manager, cluster, {name: 0} if action == "use" else {}, steps=2)
            assert len(cluster.applications) <= 2
        ready = [name for name, state in states(run(manager, cluster, steps=8)).items() if state == "ready"]
        assert len(ready) == min(2, len([model for model in manager.registry.models.values() if not model.asleep]))


def test_a_manager_that_restarts_changes_no_application(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "small")
    before = run(manager, cluster)
    again = manager_of(cluster, tmp_path)
    after = run(again, cluster)
    assert only(after).versions == only(before).versions
    assert after.revision > before.revision


def test_a_change_that_cannot_be_stored_changes_nothing(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path)
    (tmp_path / "models").rename(tmp_path / "gone")
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(MarsRayError):
        add(manager, "small")
    assert not manager.registry.models and not cluster.applications


def test_adapters_reach_the_engines_of_their_model_alone(tmp_path: Path, cluster: Cluster) -> None:
    manager = manager_of(cluster, tmp_path, adapters={"json": "one"})
    add(manager, "small")
    manager.change("key:ada", "adapter.added", "terse", "with_adapter", "small", "terse", "two", ("acme",))
    assert cluster.adapters == {"mars": {"json": "one"}, "mars:small": {"terse": "two"}}
    directory = run(manager, cluster)
    assert directory.allows("terse", "acme") and not directory.allows("terse", "other")
    manager.change("key:ada", "model.removed", "terse", "without", "terse")
    assert cluster.adapters["mars:small"] == {}


# Canaries.


def judge_after(present: float, new: float, count: int = 100, failures: int = 0) -> CanaryJudge:
    judge = CanaryJudge(1, 2, Canary(share=0.1))
    for number, mean, failed in ((1, present, 0), (2, new, failures)):
        shares = [min(1.0, max(0.0, mean + (0.05 if index % 2 else -0.05))) for index in range(count)]
        judge.add(CanaryReport(number=number, answers=count, failures=failed, agreements=shares))
    return judge


def test_a_version_that_agrees_as_much_is_promoted_and_one_that_does_not_is_taken_back() -> None:
    verdicts = {new: judge_after(0.9, new, 400).verdict() for new in (0.95, 0.9, 0.8)}
    assert {new: verdict and verdict.promote for new, verdict in verdicts.items()} == {
        0.95: True,
        0.9: True,
        0.8: False,
    }
    assert judge_after(0.9, 0.9, 99).verdict() is None, "not before there are enough answers"


def test_a_version_that_is_not_clearly_as_good_is_compared_for_longer_and_then_taken_back() -> None:
    assert judge_after(0.9, 0.88, 100).verdict() is None
    verdict = judge_after(0.9, 0.88, 1000).verdict()
    assert verdict is not None and not verdict.promote


def test_a_version_that_fails_more_often_is_taken_back_however_well_it_agrees() -> None:
    verdict = judge_after(0.9, 1.0, 100, failures=2 * FAILURES).verdict()
    assert verdict is not None and not verdict.promote
    assert "6 of 106 requests failed" in verdict.reason


def test_a_canary_is_promoted_by_the_reports_of_gateways_and_answers_its_share_until_then(
    tmp_path: Path, cluster: Cluster
) -> None:
    manager = manager_of(cluster, tmp_path)
    add(manager, "small")
    run(manager, cluster)
    add(manager, "small", TWO, Canary(share=0.25, samples=10))
    model = only(run(manager, cluster))
    assert [(each.number, each.share) for each in model.versions] == [(1, 0.75), (2, 0.25)]
    for number in (1, 2):
        manager.report("small", [CanaryReport(number=number, answers=50, agreements=[1.0] * 50)])
    model = only(run(manager, cluster))
    assert (model.number, model.new_number) == (2, None)
    assert "agreement 1.000 of 50 answers" in model.reason
