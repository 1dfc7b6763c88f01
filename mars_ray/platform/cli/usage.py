"""The commands `mars-ray usage` and `mars-ray audit`: what keys and accounts have used, and what operators changed."""

import json
import sys
import time
from dataclasses import asdict
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from mars_ray.cli.control import URL, ApiKey, Url, send_request
from mars_ray.cli.shared import wide_console
from mars_ray.errors import ConfigError
from mars_ray.platform.accounts.account_store import open_audit_log
from mars_ray.storage.audit_log import PAGE_MAX
from mars_ray.storage.location import locate

Storage = Annotated[
    str | None, typer.Option(help="`storage` of a serve config: read the usage there instead of from an endpoint.")
]
EndpointUrl = Annotated[str, typer.Option("--url", help="URL of a running `mars-ray serve`.")]
Start = Annotated[str | None, typer.Option(help="First day in UTC. Default: the first day of the month.")]
End = Annotated[str | None, typer.Option(help="Last day in UTC. Default: today.")]
By = Annotated[str, typer.Option(help="Columns to group by: some of day, account, key, model, separated by commas.")]
Account = Annotated[str | None, typer.Option(help="Only this account.")]
Out = Annotated[str | None, typer.Option(help="File or URL to write, which ends with .csv or .parquet.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per row.")]


def usage(
    storage: Storage = None,
    url: EndpointUrl = URL,
    api_key: ApiKey = None,
    start: Start = None,
    end: End = None,
    by: By = "day,account,key,model",
    account: Account = None,
    out: Out = None,
    as_json: AsJson = False,
) -> None:
    """Show requests, tokens and price by key, account, model and day, from an endpoint or from its storage."""
    from mars_ray.platform.usage.ledger import UsageLedger
    from mars_ray.platform.usage.ledger_files import usage_folder
    from mars_ray.platform.usage.usage_report import parse_query, report_rows, write_report

    if out is not None and as_json:
        raise ConfigError("give --out or --json, not both.")
    query = parse_query(_day(start, "--start"), _day(end, "--end"), by, datetime.now(UTC).date())
    if storage is not None:
        _check_folder(storage)
        sums = UsageLedger(usage_folder(storage)).view().rows(query.start, query.end, account)
        rows = report_rows(sums, query.by)
    else:
        params = {"start": query.start, "end": query.end, "group_by": ",".join(query.by)}
        params |= {} if account is None else {"account": account}
        rows = send_request("GET", url, api_key, "/admin/usage", params=params)["data"]
    if out is not None:
        write_report(rows, query.by, locate(out))
        print(f"mars-ray: wrote {len(rows)} rows to {out}.", file=sys.stderr)
    elif as_json:
        for row in rows:
            print(json.dumps(row))
    else:
        wide_console().print(_table(rows, query.by, f"usage from {query.start} to {query.end}"))


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
        _check_folder(storage)
        events = [asdict(event) for event in open_audit_log(storage).read(after, limit).events]
    else:
        params = {"limit": limit} | ({"after": after} if after else {})
        events = send_request("GET", url, api_key, "/admin/audit", params=params)["data"]
    for event in events:
        print(json.dumps(event) if as_json else _line(event))


def _check_folder(storage: str) -> None:
    """Raise `ConfigError` if `storage` is a folder on the disk that does not exist, because it would look empty."""
    path = locate(storage)
    if isinstance(path, Path) and not path.is_dir():
        raise ConfigError(f"--storage is {storage!r}, which is no folder. Name the `storage` of the serve config.")


def _day(text: str | None, option: str) -> date | None:
    try:
        return None if text is None else date.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{option} is {text!r}; give a day such as 2026-11-25.") from None


def _table(rows: list[dict[str, Any]], by: tuple[str, ...], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in by:
        table.add_column(name)
    for name in ("requests", "prompt", "cached", "answered", "accepted below 1", "at thresholds", "price"):
        table.add_column(name, justify="right")
    for row in rows:
        thresholds = ", ".join(f"{name}: {tokens}" for name, tokens in row["accepted_by_threshold"].items())
        counts = [row[name] for name in ("requests", "prompt_tokens", "cached_tokens", "answered_tokens")]
        shown = [f"{count:,}" for count in (*counts, row["accepted_tokens"])]
        table.add_row(*(escape(str(row[name])) for name in by), *shown, thresholds, f"{row['price']:,.6g}")
    return table


def _line(event: dict[str, Any]) -> str:
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(event["unix_s"]))
    details = " ".join(f"{name}={json.dumps(value)}" for name, value in event["details"].items())
    return "  ".join(filter(None, (when, event["by"], event["action"], event["subject"], details, event["cause"])))
