"""The command `mars-ray audit`, which shows what operators and policies did and why."""

import json
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from mars_ray.cli.control import URL, ApiKey, Url, send_request
from mars_ray.platform.accounts.account_store import open_audit_log
from mars_ray.storage.audit_log import PAGE_MAX


def audit(
    storage: Annotated[
        str | None, typer.Option(help="Folder or URL that is `storage` in a serve config. Default: ask the endpoint.")
    ] = None,
    url: Url = URL,
    api_key: ApiKey = None,
    limit: Annotated[int, typer.Option(min=1, max=PAGE_MAX, help="Maximum number of events.")] = 100,
    after: Annotated[str | None, typer.Option(help="Id of an event: show older ones.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
) -> None:
    """Show changes of keys, accounts, models and thresholds, the newest first."""
    events: list[dict[str, Any]]
    if storage is not None:
        events = [asdict(event) for event in open_audit_log(storage).read(after, limit).events]
    else:
        params = {"limit": limit} | ({"after": after} if after else {})
        events = send_request("GET", url, api_key, "/admin/audit", params=params)["data"]
    for event in events:
        print(json.dumps(event) if as_json else _line(event))


def _line(event: dict[str, Any]) -> str:
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event["unix_s"]))
    details = " ".join(f"{name}={json.dumps(value)}" for name, value in event["details"].items())
    return "  ".join(filter(None, (when, event["by"], event["action"], event["subject"], details, event["cause"])))
