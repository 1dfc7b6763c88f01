"""A source of drafts whose acceptance has collapsed shows in the status, its page and the command line."""

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from mars_ray.control.cluster_load import Backlog
from mars_ray.control.core.controller import Controller
from mars_ray.engine.stats.state import SourceAcceptance
from tests.control.control_samples import plan_of, report
from tests.samples import Cli

FIGURES = "masks of sql are off in 1 engine: 1% of the latest predictions were right, 81% are expected"


@pytest.fixture
def controller() -> Controller:
    """A controller of three replicas, one of which has an alarm."""
    controller = Controller(plan_of(), clock=lambda: 0.0)
    for replica, alarm in enumerate((0, 1, 0)):
        latest = SourceAcceptance("masks of sql", 0.01 if alarm else 0.8, 0.81, alarm)
        controller.handle_report(report(1, 1.0, replica=str(replica), acceptance=(latest,)))
    return controller


@pytest.fixture
def url(controller: Controller) -> Iterator[str]:
    """An endpoint that answers each request with the controller's status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(asdict(controller.status())).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_the_status_the_live_view_and_a_job_warn(controller: Controller) -> None:
    assert controller.status().warnings == (FIGURES,)
    assert controller.live("", 0).status.warnings == (FIGURES,)
    controller.update_backlog(Backlog(tokens=10.0, seconds=1.0), paused=False)
    job = controller.job()
    assert job and job.notice == FIGURES


def test_the_command_line_warns(url: str, mars_ray: Cli) -> None:
    code, shown, said = mars_ray("status", "--once", "--url", url)
    assert code == 0, said
    assert FIGURES in " ".join(shown.split())
