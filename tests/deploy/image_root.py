"""The image of a Dockerfile without Docker: its steps, one by one, in a clean Debian root.

Every command runs in mount and process namespaces of its own. What is mounted there is seen nowhere else and is gone
with the command, and so is every process it started, however it ends.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

MACHINE = "/run/machine"
"""Where commands of the build find what they need of this machine."""

SHARED: Sequence[str] = ()
"""This machine's network."""
OWN = ("unshare", "--net", "--")
"""A network with a loopback and nothing else."""

ENTER = """set -e
root=$1; shift
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=1g,mode=1777 tmpfs "$root/dev/shm"
show() {
  if [ -d "$1" ]; then mkdir -p "$2"; else mkdir -p "$(dirname "$2")"; touch "$2"; fi
  mount --bind -o ro "$1" "$2"
}
for each in /etc/resolv.conf /etc/hosts; do show "$each" "$root$each"; done
for each in $SHOWN; do show "$each" "$root/run/machine$each"; done
ip link set lo up
exec chroot "$@"
"""


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Return name and text of each instruction."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n", "", "\n".join(lines))
    return [(name, text.strip()) for name, _, text in (line.partition(" ") for line in whole.splitlines() if line)]


def network_of(process: "subprocess.Popen[str]") -> Sequence[str]:
    """Return what stands before a command to run it in the network of a process."""
    return ("nsenter", "--target", str(process.pid), "--net", "--")


def machine_pip() -> tuple[dict[str, str], list[str]]:
    """Return pip's configuration on this machine as environment variables, and the files and folders it names.

    They are named as they are found below `MACHINE`.
    """
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings, found = {"PIP_CONFIG_FILE": os.devnull}, []
    for line in listed.stdout.splitlines():  # those of the environment come first, and hold
        name, _, value = line.partition("=")
        words = value.strip("'").split()
        for number, word in enumerate(words):
            path = Path(word.removeprefix("file://"))
            if path.is_absolute() and path.exists():
                found.append(str(path.parent if word.startswith("file:") else path))  # an index has its files beside it
                words[number] = word.replace(str(path), f"{MACHINE}{path}")
        settings.setdefault(f"PIP_{name.rpartition('.')[2].upper().replace('-', '_')}", " ".join(words))
    return settings, sorted(set(found))


@dataclass
class Image:
    """What a Dockerfile makes of an empty root."""

    root: Path
    context: Path
    build_arguments: Mapping[str, str]
    """What `docker build --build-arg` would say."""
    build_environment: Mapping[str, str]
    """What only commands of the build see: this machine's way to the packages."""
    build_shown: Sequence[str] = ()
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    folder: str = "/"
    health_check: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def build(self) -> None:
        """Take every step of the Dockerfile. Raises `CalledProcessError` at the first that fails."""
        for name, text in instructions((self.context / "Dockerfile").read_text()):
            getattr(self, f"_{name.lower()}")(text)

    def start(self, command: Sequence[str], network: Sequence[str] = SHARED, **popen: Any) -> "subprocess.Popen[str]":
        """Start a command as in a container of the image, whose network is that of `network`."""
        return self._start(command, self.environment, (), network, **popen)

    def run(self, command: Sequence[str], network: Sequence[str] = SHARED) -> str:
        """Return what a command in a container of the image prints. Raises `CalledProcessError` when it fails."""
        with self.start(command, network, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            printed, said = process.communicate()
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, printed, said)
        return printed

    def _start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        shown: Iterable[str],
        network: Sequence[str],
        **popen: Any,
    ) -> "subprocess.Popen[str]":
        home = {"HOME": "/root" if self.user == "root" else f"/home/{self.user}"}
        seen = [f"{name}={value}" for name, value in (home | dict(environment)).items()]
        spaces = [*network, "unshare", "--mount", "--pid", "--fork", "--kill-child", "--"]
        entered = ["sh", "-c", ENTER, "enter", str(self.root), f"--userspec={self.user}", str(self.root)]
        return subprocess.Popen(
            [*spaces, *entered, "env", "-i", f"--chdir={self.folder}", *seen, *command],
            env=os.environ | {"SHOWN": " ".join(shown)},
            text=True,
            **popen,
        )

    # The instructions

    def _from(self, text: str) -> None:
        release, variant = re.fullmatch(r"debian:(\w+)-(slim)", text).groups()  # type: ignore[union-attr]
        assert variant == "slim"
        subprocess.run(["mmdebstrap", "--quiet", "--variant=minbase", release, str(self.root)], check=True)
        self.environment["PATH"] = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def _run(self, text: str) -> None:
        environment = self.environment | self.arguments | dict(self.build_environment)
        process = self._start(["/bin/sh", "-c", text], environment, self.build_shown, SHARED)
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, text)

    def _copy(self, text: str) -> None:
        *sources, target = text.split()
        for source in sources:
            assert f"!{source}" in (self.context / ".dockerignore").read_text().split(), f"{source} is left out"
            found, place = self.context / source, self.root / (Path(self.folder) / target).relative_to("/")
            if found.is_dir():
                shutil.copytree(found, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(found, place)

    def _arg(self, text: str) -> None:
        name, _, default = text.partition("=")
        self.arguments[name] = self.build_arguments.get(name, default)

    def _env(self, text: str) -> None:
        for each in shlex.split(text):
            name, _, value = each.partition("=")
            self.environment[name] = Template(value).substitute(self.environment)

    def _user(self, text: str) -> None:
        self.user = text

    def _workdir(self, text: str) -> None:
        self.folder = text
        (self.root / text.lstrip("/")).mkdir(parents=True, exist_ok=True)

    def _healthcheck(self, text: str) -> None:
        self.health_check = json.loads(text.partition("CMD")[2])

    def _entrypoint(self, text: str) -> None:
        self.entrypoint = json.loads(text)

    def _cmd(self, text: str) -> None:
        self.command = json.loads(text)

    def _expose(self, text: str) -> None:
        assert int(text)
