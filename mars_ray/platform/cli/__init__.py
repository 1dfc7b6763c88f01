"""Commands of the platform."""

import typer

from mars_ray.platform.cli.keys import accounts_app, keys_app
from mars_ray.platform.cli.models import models_app
from mars_ray.platform.cli.usage import audit, usage


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (audit, usage):
        app.command()(command)
    for name, group in {"keys": keys_app, "accounts": accounts_app, "models": models_app}.items():
        app.add_typer(group, name=name)
