"""Turn what a user calls a model into a folder.

No hub is contacted: a name like "Qwen/Qwen2.5-0.5B" is only a path here. Whether "bundled" is complete is for
`check_folder` to say.
"""

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from mars_ray.errors import ModelError

BUNDLED = "bundled"


def resolve_model(name: str) -> Path:
    """Return the folder `name` stands for. "bundled" is always the packaged model; write "./bundled" for a folder."""
    if name == BUNDLED:
        return Path(str(files("mars_ray"))) / "assets" / "bundled"
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    raise ModelError(f"unknown model {name!r}: give {BUNDLED!r} or a folder{_hint(folder)}")


def _hint(missing: Path) -> str:
    try:
        siblings = [entry.name for entry in missing.parent.iterdir() if entry.is_dir()]
    except OSError:
        siblings = []
    candidates = [*siblings, BUNDLED] if missing.parent == Path() else siblings
    close = get_close_matches(missing.name, candidates, n=1)
    return f". Did you mean {str(missing.parent / close[0])!r}?" if close else "."
