"""The commands `mars-ray status` and `mars-ray threshold ...`: what the controller of an endpoint does, and by hand."""

import re
import sys
import time
from typing import Annotated, Any

import httpx2
import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from mars_ray.control.policies.bounds import describe_raised_floor
from mars_ray.errors import ConfigError, RunError

threshold_app = typer.Typer(
    help="Set thresholds of an endpoint by hand, or let its policy decide.", no_args_is_help=True
)

Url = Annotated[str, typer.Option(help="URL of a running `mars-ray serve`.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="MARS_RAY_API_KEY",
        help="A key of the role 'operate'. Other users of this machine see it in ps: better set the variable.",
    ),
]
ServiceClass = Annotated[str | None, typer.Option("--class", help="Class of service. Default: all classes.")]
URL = "http://127.0.0.1:8000"
EVERY_SECONDS = 1.0
WIDTH = 200
"""Columns of the output where there is no terminal to ask."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def status(
    url: Url = URL,
    api_key: ApiKey = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit, which is the default without a terminal.")
    ] = False,
) -> None:
    """Show replicas, load, thresholds and their reasons until Ctrl-C."""
    console = Console() if sys.stdout.isatty() else Console(width=WIDTH)
    if once or not console.is_terminal:
        console.print(*_tables(_ask("GET", url, api_key)))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            grid = Table.grid()
            for table in _tables(_ask("GET", url, api_key)):
                grid.add_row(table)
            live.update(grid, refresh=True)
            time.sleep(EVERY_SECONDS)


@threshold_app.command("set")
def set_threshold(
    threshold: Annotated[float, typer.Argument(help="New threshold, from the floor of the class to its ceiling.")],
    service_class: ServiceClass = None,
    lasting: Annotated[
        str | None, typer.Option("--for", help="Duration, such as 90s, 10m or 2h. Default: until cleared.")
    ] = None,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Set a threshold, overriding the policy."""
    seconds = None if lasting is None else seconds_of(lasting, "--for")
    body = {"threshold": threshold, "service_class": service_class, "seconds": seconds}
    _ask("PUT", url, api_key, "/threshold", json=body)
    until = f"for {lasting}" if lasting else "until it is cleared"
    _say(f"threshold {threshold:g} for {service_class or 'all classes'}, {until}.")


@threshold_app.command("clear")
def clear_threshold(service_class: ServiceClass = None, url: Url = URL, api_key: ApiKey = None) -> None:
    """Let the policy decide again."""
    params = {} if service_class is None else {"service_class": service_class}
    _ask("DELETE", url, api_key, "/threshold", params=params)
    _say(f"the policy decides for {service_class or 'all classes'}.")


def _ask(method: str, url: str, api_key: str | None, path: str = "", **what: Any) -> Any:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        answer = httpx2.request(method, f"{url.rstrip('/')}/control{path}", headers=headers, timeout=10, **what)
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        raise RunError(f"{url} cannot be reached ({error}). Start the endpoint, or check --url.") from None
    if answer.status_code == 204:
        return None
    try:
        said = answer.json()
        if answer.is_success:
            return said
        message = str(said["error"]["message"])
    except (ValueError, LookupError, TypeError):
        raise RunError(f"{url} answered HTTP {answer.status_code} and is no endpoint of mars-ray.") from None
    if answer.status_code < 500:
        raise ConfigError(message)
    raise RunError(message)


def seconds_of(text: str, option: str) -> float:
    """Return the seconds in a text such as 10m. Raises `ConfigError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"{option} is {text!r}; give a time such as 90s, 10m or 2h.")
    return float(found[1]) * UNITS[found[2]]


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"


def _tables(status: dict[str, Any]) -> list[Table]:
    wanted = _replicas(status["desired_replicas"])
    classes = Table(title=f"policy {status['policy']}, {wanted} wanted", title_justify="left")
    for column in ("class", "threshold", "allowed", "requests/s", "changes", "why"):
        classes.add_column(column)
    for each in status["classes"]:
        ends_s = (each["override"] or {}).get("ends_unix_s")
        until = f" until {time.strftime('%H:%M:%S', time.localtime(ends_s))}" if ends_s else ""
        classes.add_row(
            each["name"],
            f"{each['threshold']:g}",
            f"{each['floor']:g} to {each['ceiling']:g}",
            f"{each['requests_s']:.1f}",
            str(each["changes"]),
            escape(each["reason"] + until),
        )
    raised = [
        describe_raised_floor(each["name"], each["floor_asked"], each["floor"], each["floor_reason"])
        for each in status["classes"]
    ]
    classes.caption, classes.caption_justify = escape("\n".join(filter(None, raised))) or None, "left"
    replicas = Table(title=_replicas(len(status["replicas"])), title_justify="left")
    for column in ("replica", "running", "waiting", "cache", "threshold", "tokens/forward", "agreement", "heard of"):
        replicas.add_column(column)
    for each in status["replicas"]:
        state = each["state"]
        least = min(of["threshold"] for of in state["classes"])
        point = next((point for point in state["profile"] if point["threshold"] <= least), None)
        replicas.add_row(
            each["replica"],
            f"{sum(of['running'] for of in state['classes'])}/{state['max_num_seqs']}",
            str(sum(of["waiting"] for of in state["classes"])),
            f"{state['kv_cache_usage']:.0%}",
            ", ".join(f"{of['threshold']:g}" for of in state["classes"]),
            _shown(point and point["tokens"][-1], ".2f"),
            _shown(point and point["agreement"], ".4f"),
            f"{each['age_s']:.1f} s ago",
        )
    return [classes, replicas]


def _shown(value: float | None, form: str) -> str:
    return "not measured" if value is None else f"{value:{form}}"


def _say(line: str) -> None:
    print(f"mars-ray: {line}", file=sys.stderr)
