"""A data file has changed if its content has, on a disk and in a store."""

import os
from pathlib import Path

import pytest

from mars_ray.data.source_version import has_changed, version_of
from mars_ray.storage.location import AnyPath


@pytest.fixture(params=["disk", "store"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> AnyPath:
    folder: AnyPath = tmp_path if request.param == "disk" else request.getfixturevalue("bucket")
    path = folder / "data.jsonl"
    path.write_bytes(b"one")
    return path


def test_an_untouched_file_has_not_changed(source: AnyPath) -> None:
    assert not has_changed(source, version_of(source))


@pytest.mark.parametrize("content", [b"two", b"longer"])
def test_other_content_is_a_change(source: AnyPath, content: bytes) -> None:
    version = version_of(source)
    source.write_bytes(content)
    if isinstance(source, Path):  # a clock of a disk may be too coarse to tell the writes apart
        os.utime(source, (1, 1))
    assert has_changed(source, version)


def test_a_copy_with_another_time_has_not_changed(tmp_path: Path) -> None:
    source = tmp_path / "data.jsonl"
    source.write_bytes(b"one")
    version = version_of(source)
    os.utime(source, (1, 1))
    assert not has_changed(source, version)


def test_a_file_that_is_gone_has_not_changed(source: AnyPath) -> None:
    version = version_of(source)
    source.unlink()
    assert not has_changed(source, version)
