"""How many CPUs a process may use, by cgroup files as Linux writes them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mars_ray.usable_cpus import quotas


def cgroup(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)


def found(tmp_path: Path, own: str) -> list[float]:
    (tmp_path / "own").write_text(own)
    return list(quotas(tmp_path / "cgroup", tmp_path / "own"))


def test_a_quota_of_version_2_counts_at_every_level(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    cgroup(root, {})
    cgroup(root / "slice", {"cpu.max": "150000 100000\n"})
    cgroup(root / "slice" / "unit", {"cpu.max": "max 100000\n"})
    assert found(tmp_path, "0::/slice/unit\n") == [1.5]


@pytest.mark.parametrize("folder", ["cpu,cpuacct", "cpu"])
def test_a_quota_of_version_1_counts_wherever_its_controller_is_mounted(tmp_path: Path, folder: str) -> None:
    files = {"cpu.cfs_quota_us": "300000\n", "cpu.cfs_period_us": "100000\n"}
    cgroup(tmp_path / "cgroup" / folder, {"cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"})
    cgroup(tmp_path / "cgroup" / folder / "box", files)
    assert found(tmp_path, "4:memory:/box\n3:cpu,cpuacct:/box\n0::/\n") == [3.0]


def test_a_container_that_is_told_the_path_of_its_host_finds_its_quota_at_the_root(tmp_path: Path) -> None:
    cgroup(tmp_path / "cgroup", {"cpu.max": "200000 100000\n"})
    assert found(tmp_path, "0::/kubepods/pod7/box\n") == [2.0]


def test_no_cgroup_and_files_that_cannot_be_read_are_no_quota(tmp_path: Path) -> None:
    cgroup(tmp_path / "cgroup", {"cpu.max": "what is this\n"})
    assert found(tmp_path, "0::/\n") == []
    assert list(quotas(tmp_path / "cgroup", tmp_path / "absent")) == []


def test_a_process_that_is_bound_to_one_cpu_may_use_one() -> None:
    one = (
        "import os; from mars_ray.usable_cpus import usable_cpus; "
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(usable_cpus())"
    )
    done = subprocess.run([sys.executable, "-c", one], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout == "1\n"
