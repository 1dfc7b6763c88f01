"""Private folders and files, for cached code, sockets and tokens.

In:    a folder to create, or a file to load.
Out:   for a folder: one that no other account can enter; for a file: whether only this user or root can write to it.
Never: uses a folder of another account, or leaves a folder open to others.
"""

import os
import stat
from pathlib import Path

from mars_ray.errors import OutputError


def private_folder(folder: Path, *, within: Path | None = None) -> Path:
    """Create `folder` and its missing parents with mode 0700, and return it.

    Existing folders from `within` (default: `folder`) down to `folder` are closed to other accounts. Raises
    `OutputError` if one of them belongs to another account, or the folder cannot be created.
    """
    top = within or folder
    for path in (*reversed(folder.parents), folder):
        try:
            if not path.is_dir():
                path.mkdir(mode=0o700, exist_ok=True)
            if path.is_relative_to(top):
                _close(path)
        except OSError as error:
            raise OutputError(f"the folder {path} cannot be made private: {error.strerror or error}.") from None
    return folder


def is_private(file: Path) -> bool:
    """Return whether `file` is a regular file that belongs to this user or root and is not writable by other
    accounts."""
    try:
        status = file.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_uid in _trusted() and not status.st_mode & 0o022


def _close(folder: Path) -> None:
    """Close a folder to other accounts. A folder that belongs to root and is not writable by others is left
    unchanged."""
    link = folder.lstat()  # the owner of a link can change its target
    target = folder.stat()
    if not {link.st_uid, target.st_uid} <= _trusted() or (target.st_uid != os.geteuid() and target.st_mode & 0o022):
        raise OutputError(
            f"the folder {folder} belongs to another account (uid {link.st_uid}), or others can write to it. This "
            "program would run code from it, so remove the folder, or ask its owner to remove it."
        )
    if target.st_uid == os.geteuid() and target.st_mode & 0o077:
        folder.chmod(0o700)


def _trusted() -> set[int]:
    return {os.geteuid(), 0}
