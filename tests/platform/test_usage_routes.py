"""Usage and limits over HTTP: what callers read, what operators read, and what nobody may read."""

import asyncio
import csv
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pyarrow.parquet as pq
import pytest
from openai import BadRequestError, DefaultHttpxClient, OpenAI, RateLimitError

from mars_ray.engine.chunk import Chunk
from mars_ray.engine.request import Request
from mars_ray.platform.usage.ledger import UsageLedger
from mars_ray.platform.usage.ledger_files import usage_folder
from mars_ray.serve.replicas.engine_client import EngineClient, Take
from tests.samples import Cli
from tests.serve.endpoint_clients import MODEL, check_error, connected, head_of, http, settled
from tests.serve.endpoint_samples import MESSAGES, Served, config_of, served
from tests.serve.key_samples import add_key

PRICES = {"prompt": 1.0, "cached": 0.5, "answered": 10.0}
KEYS: dict[str, dict[str, Any]] = {
    "ada": {"account": "acme"},
    "ann": {"account": "acme"},
    "bob": {},
    "root": {"role": "operate"},
    "slow": {"limits": {"requests_per_minute": 1}},
    "small": {"limits": {"tokens_per_minute": 60}},
    "spent": {"limits": {"tokens_per_day": 60}},
    "poor": {"limits": {"money_per_month": 0.0006}},
    "wide": {"limits": {"requests_per_minute": 1000, "tokens_per_minute": 10**15}},
}
FOREVER = ("0000-01-01", "9999-12-31")


class Stopping:
    """Passes on the first `limit` chunks of an answer that is not streamed, and then nothing; None passes on all."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.limit: int | None = None
        self.tokens = 0
        self.stopped = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, request: Request, take: Take, *, whole: bool = False) -> None:
        if not whole:
            await self._client.generate(request, take)
            return
        passed = 0

        async def take_some(part: Sequence[Chunk]) -> None:
            nonlocal passed
            if passed == self.limit:
                self.stopped.set()
                await asyncio.Event().wait()
            passed += len(part)
            self.tokens += sum(len(chunk.tokens) for chunk in part)
            await take(part)

        await self._client.generate(request, take_some)


@dataclass(frozen=True)
class Metered:
    """An endpoint with the keys of `KEYS`, and its storage."""

    served: Served
    keys: dict[str, str]
    storage: Path
    client: Stopping

    def http(self, key: str) -> httpx2.Client:
        return http(self.served, self.keys[key])

    def openai(self, key: str, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.served.url}/v1", api_key=self.keys[key], **options)

    def usage(self, key: str, path: str = "/v1/usage", **params: str) -> list[dict[str, Any]]:
        settled(self.served)
        with self.http(key) as client:
            answer = client.get(path, params=params)
            answer.raise_for_status()
            rows: list[dict[str, Any]] = answer.json()["data"]
            return rows

    def counts(self, key: str) -> dict[str, Any]:
        """What one key has used."""
        rows = self.usage("root", "/admin/usage", group_by="key")
        return next((row for row in rows if row["key"] == key), {"requests": 0, "answered_tokens": 0})


@pytest.fixture(scope="module")
def metered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    folder = tmp_path_factory.mktemp("metered")
    path = folder / "keys.yaml"
    keys = {name: add_key(path, name, **({"role": "use"} | fields)) for name, fields in KEYS.items()}
    config = config_of(keys=path, storage=str(folder / "storage"), prices=PRICES)
    clients: list[Stopping] = []

    def wrap(client: EngineClient) -> EngineClient:
        clients.append(Stopping(client))
        return clients[-1]

    with served(config, wrap) as running:
        yield Metered(running, keys, folder / "storage", clients[0])


CHAT = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 8}
CALLS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": MODEL, "prompt": ["Ann", "Bob and Ann"], "max_tokens": 4, "n": 2},
    "/v1/messages": {"model": MODEL, "messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"model": MODEL, "input": "Ann", "max_output_tokens": 8},
}


def tokens_in(text: str, path: str) -> tuple[int, int]:
    """Return the prompt and answered tokens that an answer, whole or streamed, tells."""
    objects = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")] or [json.loads(text)]
    usages = [each.get("usage") or each.get("response", {}).get("usage") for each in objects]
    usage: dict[str, int] = {}
    for each in usages:
        usage |= each or {}
    if path == "/v1/messages":
        start: dict[str, int] = next((each["message"]["usage"] for each in objects if "message" in each), {})
        usage = start | usage
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    answered = usage.get("completion_tokens", usage.get("output_tokens"))
    assert prompt is not None and answered is not None
    return prompt + usage.get("cache_read_input_tokens", 0), answered


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", CALLS)
def test_each_api_counts_what_its_answer_tells_before_the_answer_ends(
    metered: Metered, path: str, stream: bool
) -> None:
    def stored() -> tuple[int, int, int]:
        sums = UsageLedger(usage_folder(str(metered.storage))).view().rows(*FOREVER)
        mine = [counts for group, counts in sums.items() if group.key == "bob"]
        return (
            sum(each.requests for each in mine),
            sum(each.prompt_tokens for each in mine),
            sum(each.answered_tokens for each in mine),
        )

    before = stored()
    body = CALLS[path] | {"stream": stream}
    if stream and "completions" in path:
        body = body | {"stream_options": {"include_usage": True}}
    with metered.http("bob") as client:
        answer = client.post(path, json=body)
        after = stored()
    answer.raise_for_status()
    told = tokens_in(answer.text, path)
    assert (after[0] - before[0], after[1] - before[1], after[2] - before[2]) == (1, *told)


def test_an_account_sees_all_of_its_keys_and_nobody_elses(metered: Metered) -> None:
    for key in ("ada", "ann", "bob"):
        with metered.http(key) as client:
            client.post("/v1/chat/completions", json=CHAT).raise_for_status()
    for key in ("ada", "ann"):
        rows = metered.usage(key, group_by="account,key")
        assert {(row["account"], row["key"]) for row in rows} == {("acme", "ada"), ("acme", "ann")}
    assert {row["account"] for row in metered.usage("bob", group_by="account")} == {"bob"}
    assert metered.usage("wide", account="acme", group_by="account") == []
    everything = metered.usage("root", "/admin/usage", group_by="account")
    assert {"acme", "bob"} <= {row["account"] for row in everything}
    assert {row["account"] for row in metered.usage("root", "/admin/usage", account="acme", group_by="account")} == {
        "acme"
    }


@pytest.mark.parametrize("path", ["/admin/usage", "/admin/usage?account=bob", "//admin/usage", "/admin/usage/"])
def test_only_operators_see_the_usage_of_others(metered: Metered, path: str) -> None:
    with metered.http("ada") as client:
        assert client.get(path).status_code == 403
    with http(metered.served) as client:
        assert client.get(path).status_code == 401
        assert client.get("/v1/usage").status_code == 401


def test_the_price_is_that_of_prompt_cached_and_answered_tokens(metered: Metered) -> None:
    with metered.http("ada") as client:
        client.post("/v1/chat/completions", json=CHAT).raise_for_status()
    for row in metered.usage("ada"):
        fresh = row["prompt_tokens"] - row["cached_tokens"]
        assert row["price"] == pytest.approx((fresh + 0.5 * row["cached_tokens"] + 10 * row["answered_tokens"]) / 1e6)


def test_tokens_accepted_below_a_threshold_of_one_are_told_by_threshold(metered: Metered) -> None:
    def accepted() -> dict[str, int]:
        [row] = metered.usage("wide", group_by="key") or [{"accepted_by_threshold": {}}]
        shown: dict[str, int] = row["accepted_by_threshold"]
        return shown

    with metered.http("wide") as client:
        client.post("/v1/chat/completions", json=CHAT | {"threshold": 1.0}).raise_for_status()
        assert accepted() == {}
        streamed = client.post(
            "/v1/chat/completions", json=CHAT | {"threshold": 0.555, "block": 8, "max_tokens": 30, "stream": True}
        )
        streamed.raise_for_status()
        first = accepted()
        assert first.keys() == {"0.55"} and first["0.55"] > 0
        client.post(
            "/v1/chat/completions", json=CHAT | {"threshold": 0.555, "block": 8, "max_tokens": 30}
        ).raise_for_status()
        both = accepted()
    [row] = metered.usage("wide", group_by="key")
    assert (
        both.keys() == first.keys() and first["0.55"] < both["0.55"] == row["accepted_tokens"] < row["answered_tokens"]
    )


# Limits


def test_answers_tell_what_is_left_of_limits_and_others_carry_no_such_headers(metered: Metered) -> None:
    with metered.http("wide") as client:
        headers = client.post("/v1/chat/completions", json=CHAT).headers
    assert headers["x-ratelimit-limit-requests"] == "1000"
    assert 0 < int(headers["x-ratelimit-remaining-requests"]) < 1000
    assert headers["x-ratelimit-limit-tokens"] == str(10**15)
    assert headers["x-ratelimit-reset-requests"] in ("1m0s", "1m1s", "60s", "61s")
    with metered.http("bob") as client:
        assert not [name for name in client.post("/v1/chat/completions", json=CHAT).headers if "ratelimit" in name]


def test_requests_beyond_a_rate_are_a_429_with_the_time_to_wait(metered: Metered) -> None:
    with metered.http("slow") as client:
        client.post("/v1/chat/completions", json=CHAT).raise_for_status()
        refused = client.post("/v1/chat/completions", json=CHAT)
    message = check_error(refused, 429, code="rate_limit_exceeded")
    assert "requests_per_minute of the key 'slow' is 1" in message
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    with metered.openai("slow", max_retries=0) as client, pytest.raises(RateLimitError):
        client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    assert metered.counts("slow")["requests"] == 1, "what was refused is not counted"


def test_a_request_that_can_never_run_is_a_400_that_openais_client_does_not_repeat(metered: Metered) -> None:
    with metered.openai("small") as client, pytest.raises(BadRequestError, match="can never run") as refused:
        client.chat.completions.create(**CHAT | {"max_tokens": 100})  # type: ignore[call-overload]
    assert refused.value.code == "request_exceeds_limit"


@pytest.mark.parametrize(("key", "name"), [("spent", "tokens_per_day"), ("poor", "money_per_month")])
def test_a_spent_budget_is_an_insufficient_quota_that_openais_client_does_not_repeat(
    metered: Metered, key: str, name: str
) -> None:
    asked = 0

    def count(_request: Any) -> None:
        nonlocal asked
        asked += 1

    with metered.http(key) as client:
        for _ in range(60):
            answer = client.post("/v1/chat/completions", json=CHAT)
            if answer.status_code != 200:
                break
    assert name in check_error(answer, 429, code="insufficient_quota")
    hooked = DefaultHttpxClient(event_hooks={"request": [count]})
    with metered.openai(key, http_client=hooked) as openai, pytest.raises(RateLimitError) as refused:
        openai.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    assert (refused.value.code, asked) == ("insufficient_quota", 1)


def test_messages_are_refused_in_the_form_of_their_api(metered: Metered) -> None:
    with metered.http("spent") as client:
        refused = client.post("/v1/messages", json=CALLS["/v1/messages"] | {"max_tokens": 100})
    assert refused.status_code == 400
    assert refused.json()["type"] == "error"


def test_a_stream_that_is_cut_counts_with_what_came_and_gives_back_the_rest(metered: Metered) -> None:
    before = metered.counts("ada")
    body = CHAT | {"max_tokens": 400, "stream": True, "ignore_eos": True}
    with metered.http("ada") as client, client.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    settled(metered.served)
    after = metered.counts("ada")
    assert after["requests"] == before["requests"] + 1
    assert before["answered_tokens"] < after["answered_tokens"] <= before["answered_tokens"] + 400


def test_a_caller_who_leaves_before_a_whole_answer_is_charged_for_the_tokens_made_until_then(metered: Metered) -> None:
    before, client = metered.counts("ada"), metered.client
    client.limit, client.tokens = 2, 0
    body = json.dumps(CHAT | {"max_tokens": 400, "ignore_eos": True}).encode()
    try:
        with connected(metered.served) as raw:
            authorization = f"Authorization: Bearer {metered.keys['ada']}\r\n"
            raw.sendall(head_of(metered.served, "/v1/chat/completions", len(body), authorization) + body)
            assert client.stopped.wait(60)
        settled(metered.served)
    finally:
        client.limit = None
    after = metered.counts("ada")
    assert after["requests"] == before["requests"] + 1
    assert after["answered_tokens"] - before["answered_tokens"] == client.tokens > 0


# Reports


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"group_by": "colour"}, "cannot be grouped by 'colour'"),
        ({"start": "2026-11-25", "end": "2026-11-01"}, "give up to 366 days"),
        ({"start": "1026-11-25", "end": "2026-11-01"}, "give up to 366 days"),
        ({"start": "yesterday"}, "start"),
    ],
)
def test_a_wrong_question_is_a_400_that_names_the_value(metered: Metered, params: dict[str, str], reason: str) -> None:
    with metered.http("ada") as client:
        answer = client.get("/v1/usage", params=params)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]


def test_an_endpoint_that_counts_nothing_says_which_setting_it_lacks(endpoint: Served) -> None:
    with http(endpoint) as client:
        message = check_error(client.get("/v1/usage"), 404, code="usage_not_counted")
    assert "keys, oidc or storage" in message


def test_operators_ask_for_accounts_with_names_of_any_allowed_length(metered: Metered) -> None:
    assert metered.usage("root", "/admin/usage", account="a" * 128) == []


def test_the_command_reads_storage_and_endpoint_alike_and_exports(
    metered: Metered, mars_ray: Cli, tmp_path: Path
) -> None:
    metered.usage("root")
    from_storage = mars_ray("usage", "--storage", str(metered.storage), "--json")
    from_endpoint = mars_ray("usage", "--url", metered.served.url, "--api-key", metered.keys["root"], "--json")
    assert from_storage[0] == from_endpoint[0] == 0, from_endpoint
    rows = [json.loads(line) for line in from_storage[1].splitlines()]
    assert rows and rows == [json.loads(line) for line in from_endpoint[1].splitlines()]
    for name in ("usage.csv", "usage.parquet"):
        assert mars_ray("usage", "--storage", str(metered.storage), "--out", str(tmp_path / name))[0] == 0
    with (tmp_path / "usage.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [int(row["answered_tokens"]) for row in table] == [row["answered_tokens"] for row in rows]
    assert [float(row["price"]) for row in table] == [row["price"] for row in rows]
    columns = pq.read_table(tmp_path / "usage.parquet").to_pylist()
    assert [row | {"accepted_by_threshold": dict(row["accepted_by_threshold"])} for row in columns] == rows
    code, shown, _ = mars_ray("usage", "--storage", str(metered.storage), "--by", "account", "--account", "acme")
    assert code == 0 and "acme" in shown and "bob" not in shown


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--start", "soon"), "--start is 'soon'"),
        (("--by", "colour"), "cannot be grouped by 'colour'"),
        (("--out", "usage.xlsx"), "must end|ends with '.xlsx'"),
        (("--url", "http://127.0.0.1:9"), "cannot be reached"),
    ],
)
def test_the_command_refuses_in_one_line(
    mars_ray: Cli, tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    storage = () if "--url" in arguments else ("--storage", str(tmp_path))
    code, _, said = mars_ray("usage", *storage, *arguments)
    assert code in (1, 2)
    assert any(each in said for each in reason.split("|"))


@pytest.mark.parametrize("command", ["usage", "audit"])
def test_a_storage_that_is_not_there_is_not_shown_as_an_empty_one(mars_ray: Cli, tmp_path: Path, command: str) -> None:
    code, shown, said = mars_ray(command, "--storage", str(tmp_path / "strorage"))
    assert (code, shown) == (2, "")
    assert "strorage', which is no folder" in said
