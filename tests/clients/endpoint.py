"""Two endpoints for clients that run in another environment; they end with the standard input of this program.

Prints one line of JSON: the URL of each endpoint by the name of its model.
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.clients.scripted_model import save_scripted_model
from tests.serve.endpoint_samples import config_of, served


def main() -> None:
    """Serve the bundled model and the scripted one."""
    with TemporaryDirectory() as temporary:
        scripted = save_scripted_model(Path(temporary) / "scripted")
        with (
            served(config_of(tool_call_parser="hermes")) as bundled,
            served(config_of(name="scripted"), folder=scripted) as other,
        ):
            print(json.dumps({"bundled": bundled.url, "scripted": other.url}), flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main()
