"""Machines on this one: each has an address, processes, /tmp, /dev/shm, home and working folder of its own.

A machine is a process with namespaces of its own for network, mounts, processes and name. All that runs on it is a
child of that process: killing it is a power cut. Machines are joined by a bridge in a network namespace that belongs to
none of them. They share what is installed, and none can write to that.

Links are set down to cut a machine off; `tc netem` would need a kernel module.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mars_ray
from mars_ray.engine.kernels.build import CACHE, kernel_library
from mars_ray.engine.kernels.families import KernelError

SUBNET, MACHINES_MAX = "10.83.0", 9
HOME, WORK = Path("/tmp/home"), Path("/tmp/work")
CLUSTER_ENVIRONMENT = Path(__file__).parents[2] / "serve_configs" / "cluster.sh"
STORE, STORE_PORT = Path(__file__).parents[2] / "benchmarks" / "s3_server.py", 9000
MAKE_BUCKET = """
import sys, time, s3fs
while True:
    try:
        s3fs.S3FileSystem().mkdir(sys.argv[1])
        break
    except OSError:
        time.sleep(0.2)
"""
INIT = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_DFL)
print("up", flush=True)
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""
"""What the first process of a machine does: it takes leave of the dead, as init does."""


def unavailable() -> str | None:
    """Return why there can be no machines here, if so."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if missing := [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]:
        return f"{', '.join(missing)} not installed"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True, text=True
    )
    return f"namespaces are not allowed: {tried.stderr.strip()}" if tried.returncode else None


@dataclass(slots=True)
class Machine:
    """One of them."""

    name: str
    address: str
    init: int
    """Its first process."""
    hub: str
    """The network namespace that joins the machines."""
    environment: dict[str, str]
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def command(self, *words: str | Path) -> list[str]:
        """Return the command that runs these words on the machine."""
        here = ["nsenter", f"--target={self.init}", "--net", "--mount", "--pid", "--uts", f"--wdns={WORK}"]
        return [*here, "--", *map(str, words)]

    def start(self, *words: str | Path, **options: Any) -> subprocess.Popen[str]:
        """Start a program on the machine."""
        process = subprocess.Popen(self.command(*words), env=self.environment, text=True, **options)
        self.started.append(process)
        return process

    def run(self, *words: str | Path, timeout: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program on the machine to its end."""
        done = subprocess.run(
            self.command(*words), env=self.environment, text=True, capture_output=True, timeout=timeout
        )
        assert not check or done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def write(self, name: str, text: str) -> None:
        """Write a file into the working folder of the machine."""
        subprocess.run(self.command("tee", name), input=text, text=True, check=True, stdout=subprocess.DEVNULL)

    def copy(self, folder: Path, name: str) -> None:
        """Copy a folder of this machine into the working folder of that one."""
        packed = subprocess.run(["tar", "-C", folder, "-c", "."], check=True, capture_output=True).stdout
        self.run("mkdir", "--parents", name)
        subprocess.run(self.command("tar", "-C", name, "-x"), input=packed, check=True)

    def set_up_for_ray(self, token: str) -> None:
        """Take the environment that the nodes of a cluster have, and the token that they share."""
        said = subprocess.run(
            ["sh", "-c", f". {CLUSTER_ENVIRONMENT}; env"],
            env=self.environment,
            text=True,
            capture_output=True,
            check=True,
        )
        pairs = (line.partition("=")[::2] for line in said.stdout.splitlines())
        self.environment |= {name: value for name, value in pairs if name.startswith("RAY_")}
        self.run("mkdir", HOME / ".ray")
        self.write(f"{HOME}/.ray/auth_token", token)
        with suppress(KernelError):  # compiled once, and not on every machine anew
            kernel_library()
            self.copy(Path.home() / CACHE, str(HOME / CACHE))

    def join(self, head: "Machine", *, num_cpus: int) -> None:
        """Start Ray on it: the head of a cluster, if it is its own, else one of its nodes."""
        where = (
            ["--head", "--port=6379", "--include-dashboard=false"]
            if head is self
            else [f"--address={head.address}:6379"]
        )
        self.run(
            "ray", "start", *where, f"--node-ip-address={self.address}", f"--num-cpus={num_cpus}",
            "--disable-usage-stats", "--object-store-memory=200000000",
        )  # fmt: skip
        self.environment["RAY_ADDRESS"] = f"{head.address}:6379"

    def processes(self, pattern: str) -> list[int]:
        """Return the processes on it whose command line a pattern matches, by the numbers they have there."""
        return [int(word) for word in self.run("pgrep", "-f", pattern, check=False).stdout.split()]

    def wait_for_end(self, program: str) -> None:
        """Return when no process of a program runs on it."""
        while self.run("pgrep", program, check=False).returncode == 0:
            time.sleep(0.2)

    def cut_off(self) -> None:
        """Take it off the network."""
        _run("ip", "-n", self.hub, "link", "set", self.name, "down")

    def put_back(self) -> None:
        """Put it on the network again."""
        _run("ip", "-n", self.hub, "link", "set", self.name, "up")

    def cut_off_for(self, seconds: float) -> None:
        """Take it off the network, and put it back after so long."""
        self.cut_off()
        time.sleep(seconds)
        self.put_back()

    def power_off(self) -> None:
        """End everything on it at once."""
        with suppress(ProcessLookupError):
            os.kill(self.init, signal.SIGKILL)


class Network:
    """Joins machines; afterwards nothing is left of them."""

    def __init__(self) -> None:
        self._hub, self._built = f"mars{os.getpid()}", ExitStack()
        self.machines = list[Machine]()

    def __enter__(self) -> "Network":
        with ExitStack() as built:
            _run("ip", "netns", "add", self._hub)
            built.callback(_run, "ip", "netns", "delete", self._hub)
            _run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
            _run("ip", "-n", self._hub, "link", "set", "bridge", "up")
            self._built = built.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._built.close()

    def machine(self, *, disk: str = "4g") -> Machine:
        """Add a machine; its disk is /tmp."""
        machine = self._built.enter_context(_machine(self._hub, 1 + len(self.machines), disk))
        self.machines.append(machine)
        return machine


@contextmanager
def _machine(hub: str, number: int, disk: str) -> Iterator[Machine]:
    name, address = f"m{number}", f"{SUBNET}.{number}"
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(HOME),
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "OMP_NUM_THREADS": "1",
    }
    unshared = ["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]
    with subprocess.Popen(
        [*unshared, "sh", "-ec", _own_folders(name, disk)], stdout=subprocess.PIPE, text=True, env=environment
    ) as outside:
        assert outside.stdout is not None
        try:
            assert outside.stdout.readline() == "up\n"
            inside = int(Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text())
            machine = Machine(name, address, inside, hub, environment)
            _run("ip", "-n", hub, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(inside))
            _run("ip", "-n", hub, "link", "set", name, "master", "bridge", "up")
            network = ["nsenter", f"--target={inside}", "--net", "ip"]
            _run(*network, "link", "set", "lo", "up")
            _run(*network, "address", "add", f"{address}/24", "dev", "eth0")
            _run(*network, "link", "set", "eth0", "up")
            yield machine
            for each in machine.started:
                with each:
                    each.kill()
        finally:
            outside.kill()


def join_cluster(machines: Sequence[Machine], *, head_cpus: int, cpus: int) -> None:
    """Start Ray on machines that are set up for it: the first is the head, the others its nodes."""
    head, *others = machines
    head.join(head, num_cpus=head_cpus)
    for each in others:
        each.join(head, num_cpus=cpus)


def start_store(machine: Machine, users: Sequence[Machine], *, bucket: str) -> None:
    """Run an S3 store on a machine, with an empty bucket, for what is started on `users` from now on."""
    command = sys.executable, STORE, str(STORE_PORT), "--host", machine.address
    machine.start(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for each in users:
        each.environment |= {
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{machine.address}:{STORE_PORT}",
        }
    users[0].run(sys.executable, "-c", MAKE_BUCKET, bucket)


def _own_folders(name: str, disk: str) -> str:
    """Return the script that gives a machine a name and folders; what is installed in /tmp stays."""
    installed = {Path(sys.prefix), Path(sys.base_prefix), Path(mars_ray.__file__).parents[1]}
    kept = [path.relative_to("/tmp") for path in installed if path.is_relative_to("/tmp")]
    return "\n".join(
        [
            f"mount -t tmpfs -o mode=1777,size={disk} none /mnt",
            *(f"mkdir -p '/mnt/{path}'; mount --bind '/tmp/{path}' '/mnt/{path}'" for path in kept),
            "mount --move /mnt /tmp",
            "mount -t tmpfs -o mode=1777,size=1g none /dev/shm",
            f"mkdir {HOME} {WORK}; cd {WORK}; hostname {name}",
            # Machines find each other by name, as any two do that train together.
            f"echo 127.0.0.1 localhost > {HOME}/hosts",
            *(f"echo {SUBNET}.{number} m{number} >> {HOME}/hosts" for number in range(1, MACHINES_MAX + 1)),
            f"mount --bind {HOME}/hosts /etc/hosts",
            f"exec {sys.executable} -c '{INIT}'",
        ]
    )


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)
