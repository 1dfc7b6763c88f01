"""The command `mars-ray usage`, which shows and exports the usage of keys and accounts."""

import json
import sys
from datetime import UTC, date, datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mars_ray.cli.control import URL, WIDTH, ApiKey, send_request
from mars_ray.errors import ConfigError
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
    from mars_ray.platform.usage.usage_export import write_report
    from mars_ray.platform.usage.usage_report import parse_query, report_rows

    query = parse_query(_day(start, "--start"), _day(end, "--end"), by, datetime.now(UTC).date())
    if storage is not None:
        rows = report_rows(_stored(storage, query.start, query.end, account), query.by)
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
        console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
        console.print(_table(rows, query.by, f"usage from {query.start} to {query.end}"))


def _stored(storage: str, first: str, last: str, account: str | None) -> Any:
    from mars_ray.platform.usage.ledger import UsageLedger
    from mars_ray.platform.usage.ledger_files import usage_folder

    sums = UsageLedger(usage_folder(storage)).rows(first, last)
    return {group: counts for group, counts in sums.items() if account is None or group.account == account}


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
        table.add_row(*(str(row[name]) for name in by), *shown, thresholds, f"{row['price']:,.6g}")
    return table
