"""A job of rows on three workers, whatever happens to the machines: its command, and what came of it."""

import json
import re
import subprocess
import sys

from mars_ray.model.resolve import resolve_model
from tests.machines.machines import Machine

SECONDS = 400
READ = """
import sys
from upath import UPath
for each in UPath(sys.argv[1]).glob("rows/*"):
    print(each.read_text(), end="")
"""


class Job:
    """A job whose command runs on a machine, where its input and its model are."""

    def __init__(self, driver: Machine, output: str, *, rows: int, workers: int = 3) -> None:
        self._driver, self._output, self._rows = driver, output, rows
        self._words = (
            "mars-ray", "generate", "--input", "rows.jsonl", "--output", output, "--model", "model",
            "--workers", str(workers), "--max-tokens", "32", "--format", "jsonl",
        )  # fmt: skip
        self.said = ""
        """What the command printed, of all times that it was given."""
        driver.copy(resolve_model("bundled"), "model")
        lines = (json.dumps({"id": str(row), "prompt": f"say {row}"}) + "\n" for row in range(rows))
        driver.write("rows.jsonl", "".join(lines))

    def start(self) -> None:
        """Give the command, and return when rows are running."""
        self._process = self._driver.start(*self._words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said += line
            if re.search(r" [1-9][\d,]*/| [1-9]\d* running", line):
                return
        raise AssertionError(self.said)

    def end(self) -> int:
        """Return the exit code of the command."""
        said, _ = self._process.communicate(timeout=SECONDS)
        self.said += said
        return self._process.returncode

    def whole(self) -> bool:
        """Return whether every row is in the output once."""
        answers = self._driver.run(sys.executable, "-c", READ, self._output).stdout.splitlines()
        return sorted(int(json.loads(line)["id"]) for line in answers) == list(range(self._rows))
