"""The load balancer when the machine of a gateway is cut off: nobody waits for what nobody takes."""

import subprocess
import sys
from pathlib import Path

import pytest

from mars_ray.serve.deploy.haproxy import GONE_SECONDS
from tests.machines.machines import WORK, Machine, Network
from tests.serve.haproxy_samples import PROGRAM, written_by_ray

pytestmark = pytest.mark.slow
PORT, TOO_LONG = 8000, 28
GATEWAY = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Gateway(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
ThreadingHTTPServer(("", 8000), Gateway).serve_forever()
"""


def ask(front: Machine, patience_s: int) -> int:
    """Send a request to the load balancer; return how curl ends: 0 for an answer, `TOO_LONG` for none."""
    words = "curl", "-s", "-o", "/dev/null", "-f", "-m", str(patience_s)
    return front.run(*words, f"http://127.0.0.1:{PORT}/v1/models", check=False).returncode


def test_a_request_on_its_way_to_a_machine_that_is_cut_off_ends_soon(lan: Network, tmp_path: Path) -> None:
    front, gateway = lan.machine(), lan.machine()
    gateway.start(sys.executable, "-c", GATEWAY, stderr=subprocess.DEVNULL)
    config = written_by_ray(tmp_path, PORT, PORT).read_text().replace(str(tmp_path), str(WORK))
    front.write(
        "haproxy.cfg", config.replace(f"server gateway 127.0.0.1:{PORT}", f"server gateway {gateway.address}:{PORT}")
    )
    front.start(*PROGRAM, "-db", "-f", f"{WORK}/haproxy.cfg", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while ask(front, 1) != 0:  # from then on there is a connection that the next request takes
        pass
    gateway.cut_off()
    assert ask(front, 3 * GONE_SECONDS) not in (0, TOO_LONG)
