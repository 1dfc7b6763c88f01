"""How much memory a process may still take, by cgroup files as Linux writes them."""

from pathlib import Path

import psutil

from mars_ray.usable_memory import rooms, usable_memory_bytes
from tests.test_usable_cpus import cgroup


def found(tmp_path: Path, own: str) -> list[int]:
    (tmp_path / "own").write_text(own)
    return list(rooms(tmp_path / "cgroup", tmp_path / "own"))


def test_the_room_within_a_limit_counts_pages_of_files_as_free_at_every_level(tmp_path: Path) -> None:
    stat = {"memory.stat": "anon 5\ninactive_file 30\n"}
    cgroup(tmp_path / "cgroup", {})
    cgroup(tmp_path / "cgroup" / "slice", {"memory.max": "1000\n", "memory.current": "400\n"} | stat)
    cgroup(tmp_path / "cgroup" / "slice" / "unit", {"memory.max": "max\n", "memory.current": "300\n"} | stat)
    assert found(tmp_path, "0::/slice/unit\n") == [630]


def test_a_limit_of_version_1_counts(tmp_path: Path) -> None:
    files = {
        "memory.limit_in_bytes": "1000\n",
        "memory.usage_in_bytes": "900\n",
        "memory.stat": "total_inactive_file 50\n",
    }
    cgroup(tmp_path / "cgroup" / "memory" / "box", files)
    assert found(tmp_path, "4:memory:/box\n3:cpu,cpuacct:/box\n") == [150]


def test_no_more_than_the_machine_has_is_usable() -> None:
    assert 0 < usable_memory_bytes() <= psutil.virtual_memory().total
