"""Find the cgroups that limit this process, as Linux lists them."""

from collections.abc import Iterator
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


def cgroups_of(controller: str, mounted: Path = CGROUPS, own_cgroups: Path = OWN_CGROUPS) -> Iterator[tuple[int, Path]]:
    """Yield the version, 1 or 2, and the folder of each cgroup of this process, and of their parents.

    Of version 1 only those of a `controller`, such as `cpu` or `memory`, are listed.
    """
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mounted / controllers if controllers else mounted
        if controllers and not root.is_dir():
            root = mounted / controller
        # A container sees its own cgroup at the root, but `path` is the path on the host.
        inside = root.joinpath(*Path(path).parts[1:])
        for folder in (inside, *inside.parents):
            yield 1 if controllers else 2, folder
            if folder == root:
                break
