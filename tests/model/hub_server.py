"""A small Hugging Face hub on loopback: what `snapshot_download` asks of one, with faults on demand."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants, get_token

TOKEN = "hf_of-the-test"


@dataclass
class HubRepository:
    """One model: files by name at each commit, and which commit a branch or tag is."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    gated: bool = False

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.branches.get(revision)


@dataclass
class HubServer:
    repositories: dict[str, HubRepository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """What was asked for: method, path and range."""
    break_at: int | None = None
    """Bytes of a weight file after which the connection breaks, once for each request that begins before."""
    hold_at: int | None = None
    """Bytes of a weight file after which it sends no more until `released`; `held` is set then."""
    held: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    forbidden: bool = False
    url: str = ""

    def add(self, name: str, folder: Path, commit: str, *, branch: str = "main", gated: bool = False) -> None:
        files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
        repository = self.repositories.setdefault(name, HubRepository({}, {}))
        repository.commits[commit], repository.branches[branch], repository.gated = files, commit, gated

    @contextmanager
    def running(self) -> Iterator["HubServer"]:
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the library, which read its environment when it was imported, ask the hub at `url`."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants._HF_DEFAULT_ENDPOINT, url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


@contextmanager
def running_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Run a hub without models, with an empty cache and no token."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    assert get_token() is None
    with HubServer().running() as server:
        point_at(server.url, monkeypatch)
        yield server


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(" ".join(filter(None, (self.command, path, self.headers.get("Range")))))
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        if len(parts) < (6 if api else 4):  # the library asks for other things, too, and does without
            return self._fail(404, None)
        name, (what, revision, *rest) = ("/".join(parts[2:4]), parts[4:]) if api else ("/".join(parts[:2]), parts[2:])
        repository = self.hub.repositories.get(name)
        allowed = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if self.hub.forbidden:
            return self._fail(403, None)
        if repository is None:
            return self._fail(401 if not allowed else 404, "RepoNotFound")
        commit = repository.commit_of(revision)
        if commit is None:
            return self._fail(404, "RevisionNotFound")
        files = repository.commits[commit]
        if api and what == "revision":
            return self._json({"id": name, "sha": commit, "siblings": [{"rfilename": file} for file in files]})
        if api:
            entries = [{"type": "file", "path": file, "size": len(b), "oid": _oid(b)} for file, b in files.items()]
            return self._json(entries)
        if repository.gated and not allowed:
            return self._fail(401, "GatedRepo")
        return self._file("/".join(rest), files, commit)

    def _file(self, file: str, files: dict[str, bytes], commit: str) -> None:
        content, begin = files[file], 0
        if asked := self.headers.get("Range"):
            begin = int(asked.removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{_oid(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(content) - begin))
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            stop = self.hub.break_at
            breaks = stop is not None and begin < stop < len(content) and file.endswith(".safetensors")
            if self.hub.hold_at is not None and file.endswith(".safetensors"):
                self.wfile.write(content[begin : self.hub.hold_at])
                self.hub.held.set()
                self.hub.released.wait()
            else:
                self.wfile.write(content[begin : stop if breaks else None])
        self.close_connection = True

    def _json(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _fail(self, status: int, code: str | None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
