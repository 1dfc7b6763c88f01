"""The commands `mars-ray models ...`, which change the models and adapters of a running endpoint."""

import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.markup import escape
from rich.table import Table

from mars_ray.cli.control import URL, ApiKey, Url, send_request
from mars_ray.cli.shared import print_line, wide_console
from mars_ray.errors import ConfigError, RunError
from mars_ray.serve.deploy.deploy_file import read_settings

models_app = typer.Typer(help="Add, list and remove models and adapters of a running endpoint.", no_args_is_help=True)

PATH = "/admin/models"
POLL_SECONDS = 1.0
CHANGE_SECONDS = 660.0
"""Maximum time of a change. The endpoint may have to download a model, for which it takes up to 600 s."""

Name = Annotated[str, typer.Argument(help="Name under which callers request it.")]
Account = Annotated[
    list[str] | None,
    typer.Option("--account", help="Account that may use it, as often as needed. Default: all accounts."),
]
Wait = Annotated[bool, typer.Option(help="Wait until the endpoint is ready to answer requests for it.")]


@models_app.command("list")
def list_models(url: Url = URL, api_key: ApiKey = None) -> None:
    """List the models with their states, versions and adapters."""
    table = Table()
    for column in ("model", "state", "version", "adapters", "accounts", "notes"):
        table.add_column(column, overflow="fold")
    for model in send_request("GET", url, api_key, PATH)["data"]:
        new = f", new: {model['new_version']}" if model["new_version"] else ""
        accounts = "; ".join(f"{name}: {', '.join(allowed)}" for name, allowed in model["access"].items())
        names = ", ".join([model["name"], *model["served_names"]])
        version = f"{model['version'] or 'deployed'}{new}"
        cells = (names, model["state"], version, ", ".join(model["adapters"]), accounts or "all", model["reason"])
        table.add_row(*map(escape, cells))
    wide_console().print(table)


@models_app.command()
def add(
    name: Name,
    model: Annotated[
        str | None,
        typer.Argument(help="Folder, URL or name on a hub. Folders must exist where the deployment `Models` runs."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with the fields of an entry of `models` in a serve config.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads per engine, and CPUs that it reserves.")] = None,
    account: Account = None,
    wait: Wait = True,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Add a model, or a new version of one that the endpoint has, which takes over once it can answer."""
    settings = {} if config is None else read_settings(config, "It has the fields of an entry of `models`.")
    if model is not None:
        settings["model"] = _absolute(model)
    if "model" not in settings:
        raise ConfigError("give the model, as an argument or as `model` in --config.")
    if threads is not None:
        settings["engine"] = settings.get("engine", {}) | {"threads": threads}
    if account:
        settings["access"] = settings.get("access", {}) | {name: account}
    answer = send_request(
        "POST", url, api_key, PATH, timeout_s=CHANGE_SECONDS, json={"name": name, "settings": settings}
    )
    _report(name, answer, url, api_key, wait=wait)


@models_app.command("add-adapter")
def add_adapter(
    name: Name,
    folder: Annotated[str, typer.Argument(help="Folder, URL or name on a hub of the adapter.")],
    model: Annotated[str | None, typer.Option(help="Model that it was trained for. Default: the main model.")] = None,
    account: Account = None,
    url: Url = URL,
    api_key: ApiKey = None,
) -> None:
    """Add an adapter to a model, or replace it. Engines load it while they run."""
    body = {"name": name, "folder": _absolute(folder), "model": model, "accounts": account}
    send_request("POST", url, api_key, "/admin/adapters", timeout_s=CHANGE_SECONDS, json=body)
    print_line(f"added the adapter {name!r}. Gateways offer it within 2 s.")


@models_app.command()
def remove(name: Name, url: Url = URL, api_key: ApiKey = None) -> None:
    """Remove a model or an adapter. Requests that run may finish."""
    send_request("DELETE", url, api_key, f"{PATH}/{quote(name)}", timeout_s=CHANGE_SECONDS)
    print_line(f"removed {name!r}.")


def _report(name: str, answer: Any, url: str, api_key: str | None, *, wait: bool) -> None:
    """Wait until a model has the version that was just added, and say so. Raises `RunError` if the version fails."""
    model = _entry(name, answer)
    added = model["new_version"] or model["version"]
    print_line(f"added version {added} of {name!r}.")
    while wait and (model["state"] == "loading" or model["new_version"] == added):
        time.sleep(POLL_SECONDS)
        model = _entry(name, send_request("GET", url, api_key, PATH))
    if model["state"] == "failed":
        raise RunError(f"{name!r} cannot be served: {model['reason']}. Remove it, or add a version that can.")
    if wait and added != model["version"]:
        reason = model["reason"] or f"another version took the place of version {added}"
        raise RunError(f"{reason}. Version {model['version']} of {name!r} answers.")
    if wait:
        print_line(f"{name!r} is ready.")


def _entry(name: str, listed: Any) -> Any:
    """Return the entry of a model in the list of all. Raises `RunError` if it is gone."""
    entry = next((entry for entry in listed["data"] if entry["name"] == name), None)
    if entry is None:
        raise RunError(f"{name!r} has been removed meanwhile.")
    return entry


def _absolute(name: str) -> str:
    """Return an absolute path if `name` is a folder or a file here; the endpoint may run in another working folder."""
    path = Path(name).expanduser()
    return str(path.absolute()) if ("/" in name or "." in name) and path.exists() else name
