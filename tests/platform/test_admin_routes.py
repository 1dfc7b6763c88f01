"""Operators change keys and accounts of a running endpoint; two gateways follow, and the audit log has every act."""

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mars_ray.platform.accounts.account_store import open_account_store, open_audit_log
from mars_ray.platform.accounts.callers import AccountCallers
from mars_ray.serve.middleware.key_store import LiveKeys
from mars_ray.storage import audit_log
from mars_ray.storage.location import AnyPath
from mars_ray.storage.whole_file import write_lines
from tests.factories.clock import Clock
from tests.samples import Cli
from tests.serve.endpoint_clients import PATIENCE_S, http
from tests.serve.endpoint_samples import Served, config_of, served
from tests.serve.key_samples import BY, add_key

CLASSES = [{"name": "gold"}, {"name": "batch"}]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("admin") / "storage")


@pytest.fixture(scope="module")
def root(storage: str) -> str:
    return open_account_store("storage", storage).add(BY, name="root", role="operate")


@pytest.fixture(scope="module")
def administered(storage: str, root: str) -> Iterator[Served]:
    with served(config_of(keys="storage", storage=storage, classes=CLASSES)) as running:
        yield running


def client(administered: Served, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=administered.url, headers={"authorization": f"Bearer {key}"})


@pytest.fixture(scope="module")
def operator(administered: Served, root: str) -> Iterator[httpx2.Client]:
    with client(administered, root) as http:
        yield http


def status(administered: Served, key: str, path: str = "/v1/models") -> int:
    with client(administered, key) as http:
        return http.get(path).status_code


def test_a_key_works_from_the_answer_that_shows_it_until_it_is_removed(
    administered: Served, operator: httpx2.Client
) -> None:
    fields = {"name": "ann", "account": "team", "limits": {"requests_per_minute": 60}, "service_class": "batch"}
    made = operator.post("/admin/keys", json=fields).json()
    assert (made["object"], made["name"]) == ("key.new", "ann")
    assert status(administered, made["key"]) == 200
    assert status(administered, made["key"], "/admin/keys") == 403
    [listed] = [key for key in operator.get("/admin/keys").json()["data"] if key["name"] == "ann"]
    assert (listed["role"], listed["account"], listed["service_class"]) == ("use", "team", "batch")
    assert listed["limits"]["requests_per_minute"] == 60
    assert operator.delete("/admin/keys/ann").status_code == 204
    assert status(administered, made["key"]) == 401


def test_a_rotated_key_works_beside_the_old_one_and_a_changed_role_holds_for_both(
    administered: Served, operator: httpx2.Client
) -> None:
    old = operator.post("/admin/keys", json={"name": "bob"}).json()["key"]
    new = operator.post("/admin/keys/bob/rotate", json={"grace_seconds": 3600}).json()["key"]
    assert [status(administered, key) for key in (old, new)] == [200, 200]
    changed = operator.patch("/admin/keys/bob", json={"role": "operate"}).json()
    assert (changed["role"], changed["old_expires"] is not None) == ("operate", True)
    assert [status(administered, key, "/admin/keys") for key in (old, new)] == [200, 200]
    newest = operator.post("/admin/keys/bob/rotate", json={"grace_seconds": 0}).json()["key"]
    assert [status(administered, key) for key in (old, new, newest)] == [401, 401, 200]


def test_accounts_are_set_listed_and_removed(operator: httpx2.Client) -> None:
    made = operator.put("/admin/accounts/auth0|17", json={"limits": {"tokens_per_month": 10**9}}).json()
    assert (made["name"], made["limits"]["tokens_per_month"]) == ("auth0|17", 10**9)
    assert [account["name"] for account in operator.get("/admin/accounts").json()["data"]] == ["auth0|17"]
    assert operator.delete("/admin/accounts/auth0|17").status_code == 204
    assert operator.get("/admin/accounts").json()["data"] == []


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", "/admin/keys", {"name": "root"}, 400),
        ("POST", "/admin/keys", {"name": "two words"}, 400),
        ("POST", "/admin/keys", {"name": "eve", "service_class": "glod"}, 400),
        ("POST", "/admin/keys", {"name": "eve", "role": "admin"}, 400),
        ("POST", "/admin/keys", {"name": "eve", "expires": "2020-01-01T00:00:00Z"}, 400),
        ("POST", "/admin/keys", {"name": "eve", "expires": "soon"}, 400),
        ("POST", "/admin/keys", {"name": "eve", "limits": {"requests": 5}}, 400),
        ("POST", "/admin/keys", {"name": "eve", "limits": {"tokens_per_day": 10**30}}, 400),
        ("POST", "/admin/keys", {"name": "eve", "sha256": "0" * 64}, 400),
        ("POST", "/admin/keys", {}, 400),
        ("PATCH", "/admin/keys/nobody", {"role": "use"}, 404),
        ("PATCH", "/admin/keys/root", {"name": "other"}, 400),
        ("POST", "/admin/keys/nobody/rotate", {}, 404),
        ("POST", "/admin/keys/root/rotate", {"grace_seconds": -1}, 400),
        ("POST", "/admin/keys/root/rotate", {"grace_seconds": 1e12}, 400),
        ("DELETE", "/admin/keys/nobody", None, 404),
        ("PUT", "/admin/accounts/two words", {}, 400),
        ("PUT", "/admin/accounts/team", {"role": "use"}, 400),
        ("DELETE", "/admin/accounts/nobody", None, 404),
        ("GET", "/admin/audit?limit=0", None, 400),
        ("GET", "/admin/audit?after=../../x", None, 400),
    ],
)
def test_a_bad_request_is_refused_and_changes_nothing(
    storage: str, operator: httpx2.Client, method: str, path: str, body: Any, expected: int
) -> None:
    version = open_account_store("storage", storage).version()
    answer = operator.request(method, path, json=body) if body is not None else operator.request(method, path)
    assert answer.status_code == expected, answer.text
    assert answer.json()["error"]["message"] and "\n" not in answer.json()["error"]["message"]
    assert open_account_store("storage", storage).version() == version


ROUTES = [
    ("GET", "/admin/keys"),
    ("POST", "/admin/keys"),
    ("PATCH", "/admin/keys/root"),
    ("DELETE", "/admin/keys/root"),
    ("POST", "/admin/keys/root/rotate"),
    ("GET", "/admin/accounts"),
    ("PUT", "/admin/accounts/team"),
    ("DELETE", "/admin/accounts/team"),
    ("GET", "/admin/audit"),
    ("GET", "/admin/usage"),
    ("GET", "/admin/models"),
    ("POST", "/admin/models"),
    ("DELETE", "/admin/models/root"),
    ("POST", "/admin/adapters"),
]


def test_every_admin_route_needs_the_role_operate(administered: Served, operator: httpx2.Client) -> None:
    documented = operator.get("/openapi.json").json()["paths"]
    found = {
        (method.upper(), path.replace("{name}", "root"))
        for path, methods in documented.items()
        if path.startswith("/admin")
        for method in methods
    }
    assert found == {(method, path.replace("accounts/team", "accounts/root")) for method, path in ROUTES}
    user = operator.post("/admin/keys", json={"name": "user"}).json()["key"]
    before = operator.get("/admin/keys").json()
    for method, path in ROUTES:
        for spelling in (path, path + "/", "/v1/.." + path, path.replace("admin", "%61dmin"), path + "%0a"):
            with client(administered, user) as http:
                assert http.request(method, spelling, json={"name": "x"}).status_code in (403, 404, 405)
            assert httpx2.request(method, administered.url + spelling, json={}).status_code == 401
    assert operator.get("/admin/keys").json() == before


def page_after(operator: httpx2.Client, action: str) -> Any:
    """The newest three events, once the newest is this one."""
    until_s = time.monotonic() + PATIENCE_S
    while (page := operator.get("/admin/audit", params={"limit": 3}).json())["data"][0]["action"] != action:
        assert time.monotonic() < until_s, page
    return page


def test_the_audit_log_says_who_did_what_and_never_a_secret(
    administered: Served, storage: str, operator: httpx2.Client, root: str, mars_ray: Cli
) -> None:
    made = operator.post("/admin/keys", json={"name": "carl", "limits": {"money_per_day": 5}}).json()["key"]
    operator.put("/control/threshold", json={"threshold": 0.9, "service_class": "silver"})  # refused
    operator.put("/control/threshold", json={"threshold": 0.9, "service_class": "gold", "seconds": 60})
    operator.delete("/control/threshold")
    page = page_after(operator, "threshold.cleared")
    assert page["has_more"]
    assert [(event["by"], event["action"], event["subject"]) for event in page["data"]] == [
        ("key:root", "threshold.cleared", "*"),
        ("key:root", "threshold.set", "gold"),
        ("key:root", "key.added", "carl"),
    ]
    assert page["data"][1]["details"] == {"threshold": 0.9, "seconds": 60}
    assert page["data"][2]["details"] == {"role": "use", "limits": {"money_per_day": 5}}
    older = operator.get("/admin/audit", params={"limit": 1, "after": page["data"][2]["id"]}).json()
    assert older["data"][0]["id"] < page["data"][2]["id"]
    printed = [
        mars_ray("audit", "--url", administered.url, "--api-key", root, "--limit", "3"),
        mars_ray("audit", "--storage", storage, "--limit", "3"),
    ]
    assert printed[0] == printed[1]
    assert printed[0][0] == 0 and "key:root  key.added  carl" in printed[0][1]
    files = b"".join(path.read_bytes() for path in (Path(storage) / "accounts" / "audit").iterdir())
    assert made.encode() not in files and b"sha256" not in files


def test_an_act_is_answered_while_the_audit_log_hangs_and_is_in_it_once_the_endpoint_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    def hanging(path: AnyPath, lines: Iterable[str]) -> None:
        assert go_on.wait(PATIENCE_S)
        write_lines(path, lines)

    monkeypatch.setattr(audit_log, "write_lines", hanging)
    storage = str(tmp_path / "storage")
    keys = tmp_path / "keys.yaml"
    root = add_key(keys, "root", "operate")
    with served(config_of(keys=str(keys), storage=storage, threshold=0.99)) as running:
        try:
            with http(running, root) as operator:
                operator.timeout = PATIENCE_S / 2
                assert operator.put("/control/threshold", json={"threshold": 0.95}).status_code == 204
                assert operator.post("/admin/keys", json={"name": "ann"}).json()["key"]
                assert operator.put("/admin/accounts/team", json={}).status_code == 200
        finally:
            go_on.set()
    events = open_audit_log(storage).read().events
    assert [(event.action, event.subject) for event in events] == [
        ("account.set", "team"),
        ("key.added", "ann"),
        ("threshold.set", "*"),
    ]


def test_a_key_of_another_gateway_works_within_a_second_and_both_share_the_log(storage: str, root: str) -> None:
    clock = Clock()
    here = LiveKeys(open_account_store("storage", storage), clock)
    secret = open_account_store("storage", storage).add("key:elsewhere", name="dora", role="use")
    callers = AccountCallers(here)
    assert asyncio.run(callers.identify(secret)) is None
    clock.now_s += 1
    found = asyncio.run(callers.identify(secret))
    assert found and found.key == "dora"
    assert open_audit_log(storage).read(limit=1).events[0].by == "key:elsewhere"


def test_an_endpoint_without_keys_has_none_to_change(endpoint: Served) -> None:
    answer = httpx2.get(f"{endpoint.url}/admin/keys")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "no_keys")
    assert httpx2.get(f"{endpoint.url}/admin/audit").json()["data"] == []


def test_keys_that_cannot_be_written_or_read_are_a_503_in_one_line_and_stay_in_force(
    administered: Served, operator: httpx2.Client, storage: str
) -> None:
    folder = Path(storage) / "accounts" / "keys"
    hidden = folder.rename(folder.with_name("hidden"))
    try:
        folder.write_text("in the way")
        for answer in (operator.post("/admin/keys", json={"name": "eve"}), operator.get("/admin/keys")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
            assert "\n" not in answer.json()["error"]["message"]
    finally:
        folder.unlink()
        hidden.rename(folder)
    assert operator.get("/admin/keys").status_code == 200
