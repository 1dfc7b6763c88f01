"""The guide names the versions of clients that are tested."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_clients_has_the_versions_that_are_installed() -> None:
    lines = [line for file in ROOT.glob("requirements-*.txt") for line in file.read_text().splitlines()]
    matches = [re.match(r"([a-z-]+)(?:\[.*\])?==(.+)", line) for line in lines]
    pinned = {match[1]: match[2] for match in matches if match}
    rows = re.findall(r"^\| `([a-z-]+)` \| ([\d.]+) \|", (ROOT / "docs/serve.md").read_text(), re.MULTILINE)
    assert len(rows) == 7
    assert {name: pinned.get(name) for name, _ in rows} == dict(rows)
