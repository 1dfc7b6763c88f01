"""The commands `mars-ray keys ...`, which manage the API keys of endpoints.

A key is shown only once; the key file stores its hash.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from mars_ray.serve.middleware.api_keys import CHECK_SECONDS, Role, add_key, read_keys, remove_key

keys_app = typer.Typer(help="Add, list and remove API keys of the endpoint.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--file", help="YAML file of keys, to which `keys` in a serve config refers.")]
Name = Annotated[str, typer.Option("--name", help="Name in logs and metrics: letters, digits, '.', '_' and '-'.")]


@keys_app.command()
def add(
    file: File,
    name: Name,
    role: Annotated[
        Role, typer.Option(help="'use' calls the model; 'operate' may also read metrics and set thresholds.")
    ] = "use",
    service_class: Annotated[
        str | None,
        typer.Option("--class", help="Class of service. Default: the first class of the serve config."),
    ] = None,
) -> None:
    """Add a key and print it. The key is shown only once; the key file stores its hash."""
    key = add_key(file, name, role, service_class)
    print(key)
    _print_line(
        f"keep the key above: it is not stored. Endpoints that read {file} accept it within {CHECK_SECONDS:g} s."
    )


@keys_app.command("list")
def list_keys(file: File) -> None:
    """List the name, role, creation day and class of each key."""
    keys = read_keys(file)
    width = max((len(key.name) for key in keys), default=0)
    for key in keys:
        print(f"{key.name:<{width}}  {key.role:<7}  {key.created}  {key.service_class or ''}".rstrip())
    if not keys:
        _print_line(f"{file} has no keys: nobody may call an endpoint that reads it.")


@keys_app.command()
def remove(file: File, name: Name) -> None:
    """Remove a key; every endpoint that reads the file stops accepting it."""
    remove_key(file, name)
    _print_line(
        f"removed {name!r}. Endpoints refuse it within {CHECK_SECONDS:g} s; requests that are running may finish."
    )


def _print_line(line: str) -> None:
    print(f"mars-ray: {line}", file=sys.stderr)
