"""The commands `mars-ray status` and `mars-ray threshold ...`, which show and override an endpoint's controller."""

import asyncio
import re
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import httpx2
import typer
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from mars_ray.cli.shared import print_line, wide_console
from mars_ray.control.policies.policy import describe_raised_floor
from mars_ray.errors import ConfigError, MarsRayError, RunError

if TYPE_CHECKING:
    from mars_ray.control.core.ray_controller import FoundController

threshold_app = typer.Typer(
    help="Set thresholds of an endpoint by hand, or let its policy decide.", no_args_is_help=True
)

Url = Annotated[str, typer.Option(help="URL of a running `mars-ray serve`.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="MARS_RAY_API_KEY",
        help="Key with the role 'operate'. Prefer the environment variable, because other users can see options in ps.",
    ),
]
Controller = Annotated[
    str | None,
    typer.Option(help="Name of a controller on the Ray cluster at RAY_ADDRESS, instead of the URL of an endpoint."),
]
ServiceClass = Annotated[str | None, typer.Option("--class", help="Class of service. Default: all classes.")]
URL = "http://127.0.0.1:8000"
EVERY_SECONDS = 1.0
T = TypeVar("T")
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def status(
    url: Url = URL,
    api_key: ApiKey = None,
    controller: Controller = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit. This is the default without a terminal.")
    ] = False,
) -> None:
    """Show the replicas, the load, and the thresholds with the reasons for them, until Ctrl-C is pressed."""
    console = wide_console()
    if once or not console.is_terminal:
        console.print(*_tables(_statuses(url, api_key, controller)))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            grid = Table.grid()
            for table in _tables(_statuses(url, api_key, controller)):
                grid.add_row(table)
            live.update(grid, refresh=True)
            time.sleep(EVERY_SECONDS)


@threshold_app.command("set")
def set_threshold(
    threshold: Annotated[float, typer.Argument(help="New threshold, from the floor of the class to its ceiling.")],
    service_class: ServiceClass = None,
    duration: Annotated[
        str | None, typer.Option("--for", help="Duration, such as 90s, 10m or 2h. Default: until cleared.")
    ] = None,
    url: Url = URL,
    api_key: ApiKey = None,
    controller: Controller = None,
) -> None:
    """Set a threshold, overriding the policy."""
    seconds = None if duration is None else seconds_of(duration, "--for")
    if not 0 <= threshold <= 1:
        raise ConfigError(f"threshold is {threshold:g}, must be from 0 to 1.")
    if controller is None:
        body = {"threshold": threshold, "service_class": service_class, "seconds": seconds}
        send_request("PUT", url, api_key, "/control/threshold", json=body)
    else:
        _ask_cluster(controller, url, lambda client: client.set_threshold(threshold, service_class, seconds))
    until = f"for {duration}" if duration else "until it is cleared"
    print_line(f"threshold {threshold:g} for {service_class or 'all classes'}, {until}.")


@threshold_app.command("clear")
def clear_threshold(
    service_class: ServiceClass = None, url: Url = URL, api_key: ApiKey = None, controller: Controller = None
) -> None:
    """Clear an override, so that the policy decides again."""
    if controller is None:
        params = {} if service_class is None else {"service_class": service_class}
        send_request("DELETE", url, api_key, "/control/threshold", params=params)
    else:
        _ask_cluster(controller, url, lambda client: client.clear_threshold(service_class))
    print_line(f"the policy decides for {service_class or 'all classes'}.")


def _statuses(url: str, api_key: str | None, controller: str | None) -> list[dict[str, Any]]:
    if controller is None:
        return [send_request("GET", url, api_key, "/control")]
    return [asdict(status) for status in _ask_cluster(controller, url, lambda client: client.status())]


def _ask_cluster(name: str, url: str, ask: "Callable[[FoundController], Coroutine[Any, Any, T]]") -> list[T]:
    """Return the answers of the controllers called `name` on the cluster at RAY_ADDRESS; `url` must be the default."""
    from mars_ray.control.core.ray_controller import find_controllers
    from mars_ray.ray_cluster import connect, is_shared

    if url != URL:
        raise ConfigError("--url has no effect with --controller, which names the cluster at RAY_ADDRESS. Give one.")
    if not is_shared():
        raise ConfigError("--controller needs the address of a Ray cluster in RAY_ADDRESS, such as auto.")
    connect()

    async def all_answers() -> list[T | BaseException]:
        return await asyncio.gather(*map(ask, find_controllers(name)), return_exceptions=True)

    answers = asyncio.run(all_answers())
    errors = [answer for answer in answers if isinstance(answer, BaseException)]
    if not errors:
        return cast(list[T], answers)
    if len(errors) == len(answers) or not isinstance(errors[0], MarsRayError):
        raise errors[0]
    raise RunError(f"{len(errors)} of {len(answers)} controllers called {name!r} refused, the others obey: {errors[0]}")


def send_request(
    method: str, url: str, api_key: str | None, path: str, *, timeout_s: float = 10, **arguments: Any
) -> Any:
    """Return the parsed answer of an endpoint to an operator's request; None for an empty answer.

    Raises `ConfigError` for an unusable key or a refused request, and `RunError` if the endpoint does not answer.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key, or MARS_RAY_API_KEY, has characters that no key has. Copy the key again.")
    try:
        timeout = httpx2.Timeout(timeout_s, connect=10)
        response = httpx2.request(method, f"{url.rstrip('/')}{path}", headers=headers, timeout=timeout, **arguments)
    except httpx2.ReadTimeout:
        raise RunError(f"{url} gave no answer within {timeout_s:g} s. Try again, or look into its log.") from None
    except (httpx2.HTTPError, httpx2.InvalidURL, UnicodeError) as error:  # the last is of a host's name
        raise RunError(f"{url} cannot be reached ({error}). Start the endpoint, or check --url.") from None
    if response.status_code == 204:
        return None
    try:
        body = response.json()
        if response.is_success:
            return body
        message = str(body["error"]["message"])
    except (ValueError, LookupError, TypeError):
        raise RunError(f"{url} answered HTTP {response.status_code} and is not a mars-ray endpoint.") from None
    if response.status_code < 500:
        raise ConfigError(message)
    raise RunError(message)


def seconds_of(text: str, option: str) -> float:
    """Convert a duration such as 10m to seconds. Raises `ConfigError` if it is invalid."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"{option} is {text!r}; give a time such as 90s, 10m or 2h.")
    return float(match[1]) * UNITS[match[2]]


def _replicas(count: int) -> str:
    return f"{count} replica" if count == 1 else f"{count} replicas"


def _tables(statuses: list[dict[str, Any]]) -> list[Table]:
    return [table for status in statuses for table in _tables_of(status)]


def _tables_of(status: dict[str, Any]) -> list[Table]:
    classes = Table(
        title=f"policy {status['policy']}, {_replicas(status['desired_replicas'])} desired", title_justify="left"
    )
    for column in ("class", "threshold", "allowed", "requests/s", "changes", "why"):
        classes.add_column(column)
    for service_class in status["classes"]:
        ends_s = (service_class["override"] or {}).get("ends_unix_s")
        until = f" until {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(ends_s))}" if ends_s else ""
        classes.add_row(
            service_class["name"],
            f"{service_class['threshold']:g}",
            f"{service_class['floor']:g} to {service_class['ceiling']:g}",
            f"{service_class['requests_s']:.1f}",
            str(service_class["changes"]),
            escape(service_class["reason"] + until),
        )
    raised = [
        describe_raised_floor(entry["name"], entry["floor_asked"], entry["floor"], entry["floor_reason"])
        for entry in status["classes"]
    ]
    classes.caption = escape("\n".join(filter(None, raised))) or None
    classes.caption_justify = "left"
    replicas = Table(title=_replicas(len(status["replicas"])), title_justify="left")
    for column in ("replica", "running", "waiting", "cache", "threshold", "tokens/forward", "agreement", "last report"):
        replicas.add_column(column)
    for replica in status["replicas"]:
        state = replica["state"]
        lowest = min(load["threshold"] for load in state["classes"])
        point = next((point for point in state["profile"] if point["threshold"] <= lowest), None)
        replicas.add_row(
            replica["replica"],
            f"{sum(load['running'] for load in state['classes'])}/{state['max_num_seqs']}",
            str(sum(load["waiting"] for load in state["classes"])),
            f"{state['kv_cache_usage']:.0%}",
            ", ".join(f"{load['threshold']:g}" for load in state["classes"]),
            _shown(point and point["tokens"][-1], ".2f"),
            _shown(point and point["agreement"], ".4f"),
            f"{replica['age_s']:.1f} s ago",
        )
    notes = [note for replica in status["replicas"] for note in _engine_notes(replica["replica"], replica["state"])]
    replicas.caption = escape("\n".join(filter(None, [*notes, *status["warnings"], status["notice"]]))) or None
    replicas.caption_justify = "left"
    return [classes, replicas, *_prices(status)]


def _engine_notes(replica: str, state: dict[str, Any]) -> list[str]:
    """Return a line about an engine that does not work now, and one about its processes that were replaced."""
    restarts = ", ".join(f"{restarts['count']} {restarts['reason']}" for restarts in state["restarts"])
    return [
        *([f"{replica}: {state['obstacle']}"] if state["obstacle"] else []),
        *([f"{replica}: processes replaced: {restarts}"] if restarts else []),
    ]


def _prices(status: dict[str, Any]) -> list[Table]:
    """Return a table of the price per million tokens, now and at each threshold; none if the replicas have no price."""
    if status["price_per_hour"] is None:
        return []
    prices = Table(title=f"price {status['price_per_hour']:,g} an hour", title_justify="left")
    for column in ("threshold", "price per million tokens", "demand"):
        prices.add_column(column)
    prices.add_row("now", _shown(status["price_per_million_tokens"], ",.3f"))
    for point in status["curve"]:
        price = _shown(point["price_per_million_tokens"], ",.3f")
        prices.add_row(f"{point['threshold']:g}", price, f"expected at {point['demand']:.0%} of the capacity")
    return [prices]


def _shown(value: float | None, form: str) -> str:
    return "not measured" if value is None else f"{value:{form}}"
