"""An S3 store in a process of its own: moto's server, which nobody here wrote."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

SERVER = Path(__file__).parent.parent / "benchmarks" / "s3_server.py"
SECONDS = 180


def free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def use_store(port: int) -> None:
    """Let the clients of this process, and of all it starts, speak with the store at `port`."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


@contextmanager
def store_server(port: int, *options: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the store at `port`; for its options see `benchmarks/s3_server.py`."""
    command = [sys.executable, str(SERVER), str(port), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(port, process)
            yield process
        finally:
            process.kill()


def wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    """Return when the store takes requests."""
    ends_s = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < ends_s:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError("the store did not come up")
