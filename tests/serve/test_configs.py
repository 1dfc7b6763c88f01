"""The files in serve_configs/ say what they seem to say, and a name nobody knows is never passed over."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.build_app import build_app

from mars_ray.errors import ConfigError
from mars_ray.installed import settings_class
from mars_ray.model.resolve import resolve_model
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.ray_serve import build_openai_app
from mars_ray.serve.deploy.deploy_file import read_deploy_file
from mars_ray.serve.deploy.environment import SETTINGS, haproxy_files
from mars_ray.serve.deploy.serve_config import ServeConfig, parse_config
from mars_ray.serve.ray.autoscaling import by_capacity
from mars_ray.serve.ray.schema import schema_of
from tests.model.hub_server import running_hub

KIND = settings_class()

FOLDER = Path(__file__).parents[2] / "serve_configs"
OF_RAY = ("vms", "ray_serve_llm")
"""Files for Ray's own programs."""
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.stem not in OF_RAY)
KUBERAY = FOLDER / "kuberay.yaml"
IMAGE = f"mars-ray:{version('mars-ray')}"

Fields = dict[str, Any]


def kuberay() -> list[Fields]:
    return list(yaml.safe_load_all(KUBERAY.read_text()))


@pytest.fixture
def own_file(tmp_path: Path) -> Callable[[Path], Path]:
    """Gives the Serve config itself, also where it stands in a file for Kubernetes."""

    def own(path: Path) -> Path:
        if path != KUBERAY:
            return path
        inside = tmp_path / "kuberay-serve.yaml"
        inside.write_text(kuberay()[0]["spec"]["serveConfigV2"])
        return inside

    return own


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Any], Path]:
    def write(content: Any) -> Path:
        path = tmp_path / "deploy.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return path

    return write


def full() -> Fields:
    """A file with something at every level."""
    application = {
        "name": "mars",
        "route_prefix": "/",
        "import_path": "mars_ray.ray_serve:build_openai_app",
        "logging_config": {"encoding": "JSON"},
        "args": {"model": "bundled", "engine": {"max_num_seqs": 2}, "limits": {"n": 2}},
        "deployments": [
            {
                "name": "Engine",
                "autoscaling_config": {"min_replicas": 1, "max_replicas": 2, "policy": {"policy_kwargs": {}}},
                "ray_actor_options": {"num_cpus": 1},
                "logging_config": {"log_level": "INFO"},
                "request_router_config": {"initial_backoff_s": 1.0},
            }
        ],
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1"},
        "grpc_options": {"port": 9000},
        "logging_config": {"encoding": "JSON"},
        "applications": [application],
    }


def check(path: Path) -> None:
    schema_of(read_deploy_file(KIND, path), str(path))


def test_replicas_take_the_commit_a_branch_has_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub(tmp_path, monkeypatch) as hub:
        hub.add("someone/small-model", resolve_model("bundled"), "1" * 40)
        [config] = deployments_of({"model": "someone/small-model"})["Engine"].init_args
    assert (config.model, config.model_name) == (f"someone/small-model@{'1' * 40}", "small-model")


def put(fields: Any, place: list[str | int], name: str, value: Any) -> None:
    for part in place:
        fields = fields[part]
    fields[name] = value


def deployments_of(args: Fields) -> dict[str, Any]:
    return {each.name: each for each in build_app(build_openai_app(args), name="mars").deployments}


def test_there_are_files_for_a_laptop_a_cluster_fixed_quality_kubernetes_and_a_real_model() -> None:
    names = {path.stem for path in FILES}
    assert names == {"laptop", "autoscaled", "fixed_threshold", "kuberay", "smollm2", "container", "rehearsal"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_what_ray_serve_and_the_endpoint_take(path: Path, own_file: Callable[[Path], Path]) -> None:
    schema = schema_of(read_deploy_file(KIND, own_file(path)), str(path))
    [application] = schema.applications
    assert application.import_path == "mars_ray.ray_serve:build_openai_app"
    parse_config(KIND, application.args)
    built = deployments_of(application.args | {"model": "bundled", "adapter": None})  # nothing is downloaded for a test
    assert {each.name for each in application.deployments} <= set(built)


@pytest.mark.platform
def test_the_names_a_file_may_use_are_those_that_are_built() -> None:
    assert set(deployments_of({"storage": "memory://names"})) == set(KIND.deployments)


def test_the_file_for_a_laptop_is_what_serve_does_without_a_file() -> None:
    written, default = (
        read_deploy_file(KIND, FOLDER / "laptop.yaml"),
        read_deploy_file(KIND, None),
    )
    [ours], [theirs] = written.pop("applications"), default.pop("applications")
    assert written == default
    assert {name: ours[name] for name in ("name", "route_prefix", "import_path")} == {
        name: theirs[name] for name in ("name", "route_prefix", "import_path")
    }
    assert parse_config(KIND, ours["args"]) == parse_config(KIND, theirs["args"])
    for said in ours["deployments"]:
        deployment = deployments_of({})[said["name"]]
        assert deployment.num_replicas == said["num_replicas"]
        assert said.get("ray_actor_options", {}).items() <= deployment.ray_actor_options.items()


def test_the_autoscaled_file_scales_engines_and_asks_for_keys() -> None:
    [application] = read_deploy_file(KIND, FOLDER / "autoscaled.yaml")["applications"]
    gateway, engine = application["deployments"]
    assert (gateway["name"], gateway["num_replicas"], engine["name"]) == ("Gateway", 2, "Engine")
    scaling, config = engine["autoscaling_config"], parse_config(KIND, application["args"])
    assert (scaling["min_replicas"], scaling["max_replicas"]) == (1, 4)
    assert config.engine.max_num_seqs and scaling["target_ongoing_requests"] < config.engine.max_num_seqs
    assert config.keys and "*" not in config.allowed_hosts
    assert scaling["policy"] == {"policy_function": f"{by_capacity.__module__}:{by_capacity.__name__}"}
    assert [each.name for each in config.classes] == ["interactive", "batch"]


def test_the_fixed_file_answers_as_one_token_at_a_time_would() -> None:
    [application] = read_deploy_file(KIND, FOLDER / "fixed_threshold.yaml")["applications"]
    config = parse_config(KIND, application["args"])
    assert (config.mode, config.control.policy) == ("exact", "fixed")
    assert all("autoscaling_config" not in each for each in application["deployments"])


# KubeRay


def test_the_ray_service_has_the_fields_its_definition_demands() -> None:
    service, policy = kuberay()
    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    assert service["metadata"]["name"]
    cluster = service["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        [container] = group["template"]["spec"]["containers"]
        assert container["name"] and container["image"] == IMAGE
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert mounts.keys() <= volumes
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
    for group in groups[1:]:
        assert group["groupName"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_the_pods_run_the_ray_that_is_installed_here() -> None:
    import ray

    assert kuberay()[0]["spec"]["rayClusterConfig"]["rayVersion"] == ray.__version__


def test_every_pod_asks_for_the_token_and_runs_the_fast_mode() -> None:
    """As `mars-ray serve` does; how long a gateway drains is left to Ray, for here balancers elsewhere must notice."""
    cluster = kuberay()[0]["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    wanted = {
        name: value for name, value in SETTINGS.items() if name != "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
    }
    wanted |= haproxy_files(Path("/home/mars/haproxy"))
    wanted["RAY_SERVE_HAPROXY_BINARY_PATH"] = "/opt/mars-ray/bin/mars-ray-haproxy"
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        [container] = group["template"]["spec"]["containers"]
        assert {each["name"]: each["value"] for each in container["env"]} == wanted


def test_probes_are_programs_that_compile_and_have_time_for_all_they_read() -> None:
    cluster = kuberay()[0]["spec"]["rayClusterConfig"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        [container] = group["template"]["spec"]["containers"]
        for probe in (container["readinessProbe"], container["livenessProbe"]):
            interpreter, option, program = probe["exec"]["command"]
            assert (interpreter, option) == ("python", "-c")
            compile(program, "probe", "exec")
            assert probe["timeoutSeconds"] > 5 * program.count("http://")


def test_an_engine_fits_a_pod_and_its_keys_are_mounted() -> None:
    spec = kuberay()[0]["spec"]
    [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
    _, engine = application["deployments"]
    [group] = spec["rayClusterConfig"]["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    assert engine["ray_actor_options"]["num_cpus"] <= int(container["resources"]["limits"]["cpu"])
    assert engine["autoscaling_config"]["max_replicas"] <= group["maxReplicas"]
    assert Path(application["args"]["keys"]).parent == Path(container["volumeMounts"][0]["mountPath"])


def test_a_file_for_kubernetes_given_to_serve_says_what_it_is_for(written: Callable[[Any], Path]) -> None:
    with pytest.raises(ConfigError, match="is for Kubernetes"):
        read_deploy_file(KIND, written(kuberay()[0]))


# Names and values


def test_a_file_with_something_at_every_level_passes(written: Callable[[Any], Path]) -> None:
    check(written(full()))


ENGINE: list[str | int] = ["applications", 0, "deployments", 0]


@pytest.mark.parametrize(
    ("place", "shown", "known"),
    [
        ([], "", "http_options"),
        (["http_options"], "http_options", "keep_alive_timeout_s"),
        (["grpc_options"], "grpc_options", "grpc_servicer_functions"),
        (["logging_config"], "logging_config", "enable_access_log"),
        (["applications", 0], "applications[0]", "import_path"),
        (["applications", 0, "logging_config"], "applications[0].logging_config", "log_level"),
        (["applications", 0, "args"], "applications[0].args", ", ".join(KIND.model_fields)),
        (["applications", 0, "args", "engine"], "applications[0].args.engine", "max_kv_tokens"),
        (["applications", 0, "args", "limits"], "applications[0].args.limits", ", ".join(RequestLimits.model_fields)),
        (ENGINE, "applications[0].deployments[0]", "num_replicas"),
        ([*ENGINE, "autoscaling_config"], "applications[0].deployments[0].autoscaling_config", "upscale_delay_s"),
        ([*ENGINE, "autoscaling_config", "policy"], "autoscaling_config.policy", "policy_function"),
        ([*ENGINE, "ray_actor_options"], "applications[0].deployments[0].ray_actor_options", "num_gpus"),
        ([*ENGINE, "logging_config"], "applications[0].deployments[0].logging_config", "log_level"),
        ([*ENGINE, "request_router_config"], "deployments[0].request_router_config", "request_router_class"),
    ],
)
def test_an_unknown_name_at_any_level_is_refused_with_file_place_and_known_names(
    written: Callable[[Any], Path], place: list[str | int], shown: str, known: str
) -> None:
    fields = full()
    put(fields, place, "reqlicas", 3)
    path = written(fields)
    with pytest.raises(ConfigError) as refused:
        check(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: ")
    assert f"{shown}: unknown field 'reqlicas'" in message
    assert known in message.split("Known are")[1]


@pytest.mark.parametrize(
    ("place", "name", "value", "said"),
    [
        ([], "proxy_location", "Everywhere", "proxy_location"),
        (["http_options"], "port", "eight", "http_options.port"),
        ([], "http_options", 8000, "http_options is 8000"),
        ([], "applications", [{}, {}], "exactly one application"),
        ([], "applications", {"name": "mars"}, "exactly one application"),
        (["applications", 0], "args", ["bundled"], "args is ['bundled']"),
        (["applications", 0], "import_path", "nowhere", "applications[0].import_path"),
        (["applications", 0, "args"], "threshold", 95, "applications[0].args.threshold"),
        (["applications", 0, "args"], "limits", {"n": 0}, "applications[0].args.limits.n"),
        (["applications", 0, "args"], "control", {"policy": "deadline"}, "policy is 'deadline', which is for jobs"),
        (["applications", 0], "deployments", ["Engine"], "deployments[0] is 'Engine'"),
        (["applications", 0], "deployments", [{"name": "Engin"}], "unknown deployment 'Engin'"),
        (ENGINE, "name", None, f"unknown deployment None. Known are {', '.join(KIND.deployments)}."),
        (ENGINE, "num_replicas", "many", "deployments[0]"),
        (ENGINE, "max_ongoing_requests", 0, "deployments[0].max_ongoing_requests"),
        ([*ENGINE, "autoscaling_config"], "min_replicas", -1, "autoscaling_config.min_replicas"),
        ([*ENGINE, "autoscaling_config"], "min_replicas", 9, "autoscaling_config: max_replicas (2) must be greater"),
        ([*ENGINE, "ray_actor_options"], "num_cpus", -1, "ray_actor_options.num_cpus"),
    ],
)
def test_an_impossible_value_is_refused_with_file_and_place(
    written: Callable[[Any], Path], place: list[str | int], name: str, value: Any, said: str
) -> None:
    fields = full()
    put(fields, place, name, value)
    path = written(fields)
    with pytest.raises(ConfigError) as refused:
        check(path)
    assert str(refused.value).startswith(str(path))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_limit_on_lost_accuracy_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    fields = {"model": "x", "control": {"max_accuracy_loss": 0.005}, "classes": [{"name": "gold", "floor": 0.6}]}
    with pytest.raises(ConfigError, match=r"max_accuracy_loss is 0\.005, but .* class gold may fall to its floor 0\.6"):
        ServeConfig.model_validate(fields).plan(tmp_path)
    ServeConfig.model_validate(fields | {"classes": [{"name": "gold"}]}).plan(tmp_path)
    fixed = {"max_accuracy_loss": 0.005, "policy": "fixed"}  # lets no class fall to its floor
    ServeConfig.model_validate(fields | {"control": fixed}).plan(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "a: [", "\tx: 1", "[" * 100_000])
def test_what_holds_no_settings_is_refused_by_name(written: Callable[[Any], Path], content: str) -> None:
    path = written(content)
    with pytest.raises(ConfigError, match=r"deploy\.yaml"):
        read_deploy_file(KIND, path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml cannot be read"):
        read_deploy_file(KIND, tmp_path / "nowhere.yaml")


# What the command line says, and paths


def test_the_command_line_takes_the_place_of_the_file(written: Callable[[Any], Path], tmp_path: Path) -> None:
    fields = read_deploy_file(KIND, written(full()), model=str(tmp_path), host="localhost", port=1)
    assert fields["http_options"] == {"host": "localhost", "port": 1}
    assert fields["applications"][0]["args"]["model"] == str(tmp_path)


def test_a_host_beyond_this_machine_needs_keys(written: Callable[[Any], Path]) -> None:
    with pytest.raises(ConfigError, match="no API keys"):
        read_deploy_file(KIND, written(full()), host="0.0.0.0")
    fields = full()
    put(fields, ["applications", 0, "args"], "keys", "keys.yaml")
    assert read_deploy_file(KIND, written(fields), host="0.0.0.0")["http_options"]["host"] == "0.0.0.0"


def test_relative_paths_start_from_the_working_directory_and_become_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, elsewhere = tmp_path / "work", tmp_path / "elsewhere"
    for folder in (work / "model", elsewhere):
        folder.mkdir(parents=True)
    fields = full()
    fields["applications"][0]["args"] |= {"model": "model", "keys": "keys.yaml"}
    (elsewhere / "deploy.yaml").write_text(yaml.safe_dump(fields))
    monkeypatch.chdir(work)
    args = read_deploy_file(KIND, elsewhere / "deploy.yaml")["applications"][0]["args"]
    assert (args["model"], args["keys"]) == (str(work / "model"), str(work / "keys.yaml"))


def test_a_tilde_is_the_home_of_who_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "deploy.yaml").write_text(
        yaml.safe_dump({"applications": [{"args": {"model": "~/model", "keys": "~/keys.yaml"}}]})
    )
    args = read_deploy_file(KIND, tmp_path / "deploy.yaml")["applications"][0]["args"]
    assert (args["model"], args["keys"]) == (str(tmp_path / "model"), str(tmp_path / "keys.yaml"))


def test_the_bundled_model_and_one_that_only_the_nodes_have_stay_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundled").mkdir()
    assert read_deploy_file(KIND, None, model="bundled")["applications"][0]["args"]["model"] == "bundled"
    assert read_deploy_file(KIND, None, model="/models/far")["applications"][0]["args"]["model"] == "/models/far"


def test_an_engine_of_several_gpus_reserves_them_for_each_replica_on_one_node() -> None:
    args = {"engine": {"engine": "vllm", "tensor_parallel_size": 2, "threads": 3}}
    assert deployments_of(args)["Engine"].ray_actor_options == {"num_cpus": 3, "num_gpus": 2}
    assert "num_gpus" not in deployments_of({"engine": "vllm"})["Engine"].ray_actor_options


def test_the_engine_may_be_its_name_alone(written: Callable[[Any], Path]) -> None:
    assert parse_config(KIND, {"engine": "vllm"}).engine.engine == "vllm"
    fields = {"applications": [{"name": "mars", "import_path": "x:y", "args": {"engine": "vllm"}}]}
    read = read_deploy_file(KIND, written(fields), engine={"threads": 2})
    assert read["applications"][0]["args"]["engine"] == {"engine": "vllm", "threads": 2}
    with pytest.raises(ConfigError, match=r"engine\.engine: Input should be 'mars' or 'vllm'; it is 'other'"):
        parse_config(KIND, {"engine": "other"})
