"""What the files for a cluster of one's own machines say."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mars_ray.serve.deploy.environment import SETTINGS, haproxy_files

FOLDER = Path(__file__).parents[2] / "serve_configs"


def sourced(path: Path) -> dict[str, str]:
    """Return what a shell has in its environment after a file, and had not before."""
    binaries = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", f". {path} && env -0"], env=binaries, capture_output=True, text=True, check=True)
    found = dict(each.split("=", 1) for each in done.stdout.split("\0") if each)
    return {name: value for name, value in found.items() if name.startswith("RAY_")}


def test_nodes_that_source_the_file_run_the_fast_mode_with_the_token() -> None:
    """How long a gateway drains is left to Ray, for here balancers elsewhere must notice."""
    wanted = {
        name: value for name, value in SETTINGS.items() if name != "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"
    }
    found = sourced(FOLDER / "cluster.sh")
    assert os.access(found.pop("RAY_SERVE_HAPROXY_BINARY_PATH"), os.X_OK)
    assert found == wanted | haproxy_files(Path(f"/tmp/mars-ray-{os.geteuid()}"))


def test_haproxy_s_folder_on_a_node_is_for_its_owner_alone() -> None:
    folder = Path(sourced(FOLDER / "cluster.sh")["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"])
    assert folder.stat().st_mode & 0o777 == 0o700
    node, taking_over = "0" * 56, ".4194304.tmp"  # HAProxy binds its socket under such a name, and renames it
    assert len(f"{folder}/{node}/metrics.sock{taking_over}") <= 107


@pytest.fixture
def prepared() -> dict[str, Any]:
    """The cluster file as Ray's launcher takes it, with its defaults."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config: dict[str, Any] = prepare_config(yaml.safe_load((FOLDER / "vms.yaml").read_text()))
    validate_config(config)
    return config


def test_the_launcher_takes_the_file_and_keeps_all_workers(prepared: dict[str, Any]) -> None:
    workers = prepared["provider"]["worker_ips"]
    [kind] = prepared["available_node_types"].values()
    assert (kind["min_workers"], kind["max_workers"]) == (len(workers), len(workers))


def test_every_node_gets_the_token_and_starts_with_the_same_environment(prepared: dict[str, Any]) -> None:
    assert prepared["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    [target] = [target for target, source in prepared["file_mounts"].items() if source == "."]
    for commands in (prepared["head_start_ray_commands"], prepared["worker_start_ray_commands"]):
        [start] = [each for each in commands if "ray start" in each]
        assert f". {target}/serve_configs/cluster.sh && " in start.partition("ray start")[0]


@pytest.mark.parametrize(
    "phase", ["initialization_commands", "setup_commands", "head_start_ray_commands", "worker_start_ray_commands"]
)
def test_commands_are_shell(prepared: dict[str, Any], phase: str) -> None:
    assert prepared[phase]
    for command in prepared[phase]:
        subprocess.run(["sh", "-n", "-c", command], check=True)
