"""Folders of one account: made closed, closed where they were open, refused where they are another's."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mars_ray.errors import OutputError
from mars_ray.storage.private import is_private, private_folder

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def generous_umask() -> Iterator[None]:
    """What a file is made with on a system where each user has a group, and everybody is in it."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_every_folder_that_is_made_is_for_its_owner_alone(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "cache" / "mars-ray" / "kernels", within=tmp_path / "cache" / "mars-ray")
    assert [mode(each) for each in (folder, folder.parent, folder.parent.parent)] == [0o700] * 3


def test_a_folder_that_was_open_to_others_is_closed_from_the_top_on(tmp_path: Path) -> None:
    folder = tmp_path / "mars-ray" / "kernels"
    folder.mkdir(parents=True)
    tmp_path.chmod(0o755)
    private_folder(folder, within=folder.parent)
    assert [mode(each) for each in (folder, folder.parent, tmp_path)] == [0o700, 0o700, 0o755]


@as_root
@pytest.mark.parametrize("place", ["mars-ray", "mars-ray/kernels"])
def test_a_folder_of_another_account_is_refused(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "mars-ray" / "kernels"
    folder.mkdir(parents=True)
    os.chown(tmp_path / place, NOBODY, NOBODY)
    with pytest.raises(OutputError, match=f"{place} belongs to another account .uid {NOBODY}"):
        private_folder(folder, within=tmp_path / "mars-ray")


@as_root
def test_a_link_of_another_account_is_refused_wherever_it_leads(tmp_path: Path) -> None:
    (tmp_path / "ours").mkdir()
    link = tmp_path / "mars-ray"
    link.symlink_to(tmp_path / "ours")
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(OutputError, match="belongs to another account"):
        private_folder(link)


def test_where_a_file_is_in_the_way_the_reason_is_said(tmp_path: Path) -> None:
    (tmp_path / "mars-ray").write_text("")
    with pytest.raises(OutputError, match="cannot be made private: File exists"):
        private_folder(tmp_path / "mars-ray")


def test_a_file_that_others_may_write_is_not_private(tmp_path: Path) -> None:
    file = tmp_path / "library.so"
    assert not is_private(file)
    file.touch()
    assert not is_private(file), "the group may write it"
    file.chmod(0o644)
    assert is_private(file)
    (tmp_path / "link.so").symlink_to(file)
    assert not is_private(tmp_path / "link.so"), "where a link leads can change"


@as_root
def test_a_file_of_another_account_is_not_private(tmp_path: Path) -> None:
    file = tmp_path / "library.so"
    file.touch(mode=0o600)
    os.chown(file, NOBODY, NOBODY)
    assert not is_private(file)
