"""Folders and files that belong to this user alone: caches whose contents are run, sockets, tokens.

In:    a folder to make, or a file to load.
Out:   a folder that no other account can enter; whether a file can have been written by this user or root only.
Never: uses what another account owns, or leaves a folder open to others.
"""

import os
import stat
from pathlib import Path

from mars_ray.errors import OutputError


def private_folder(folder: Path, *, within: Path | None = None) -> Path:
    """Make `folder` and the folders above it that are missing, all with mode 0700, and return it.

    Folders from `within` (default: `folder`) down to `folder` that exist are closed to other accounts. Raises an
    `OutputError` where one of them is another account's, or the folder cannot be made.
    """
    top = within or folder
    for each in (*reversed(folder.parents), folder):
        try:
            if not each.is_dir():
                each.mkdir(mode=0o700, exist_ok=True)
            if each.is_relative_to(top):
                _close(each)
        except OSError as error:
            raise OutputError(f"the folder {each} cannot be made private: {error.strerror or error}.") from None
    return folder


def is_private(file: Path) -> bool:
    """Return whether `file` is a plain file of this user or root which no other account can write."""
    try:
        found = file.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid in _trusted() and not found.st_mode & 0o022


def _close(folder: Path) -> None:
    """Take a folder from other accounts. One of root's that others cannot write may stay as it is."""
    link, found = folder.lstat(), folder.stat()  # a link of another account may lead elsewhere tomorrow
    if not {link.st_uid, found.st_uid} <= _trusted() or (found.st_uid != os.geteuid() and found.st_mode & 0o022):
        raise OutputError(
            f"the folder {folder} belongs to another account (uid {link.st_uid}), or others can write to it. What is "
            "in it would be run: remove it, or have its owner do so."
        )
    if found.st_uid == os.geteuid() and found.st_mode & 0o077:
        folder.chmod(0o700)


def _trusted() -> set[int]:
    return {os.geteuid(), 0}
