"""A folder of one node, on the others."""

from pathlib import Path

import pytest
import ray

from mars_ray.errors import ModelError
from mars_ray.model.digest import folder_digest
from mars_ray.model.resolve import resolve_model
from mars_ray.model.sources.ray_folder import SharedFolder, share_folder

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]
BUNDLED = resolve_model("bundled")


def test_a_folder_travels_through_ray_and_is_taken_as_it_is_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shared = share_folder(BUNDLED)
    copy = shared.fetch()
    assert copy.is_relative_to(tmp_path)
    assert folder_digest(copy) == folder_digest(BUNDLED)
    assert shared.here() == BUNDLED
    assert resolve_model(str(shared)) == BUNDLED  # by a name that every node takes


def test_a_folder_of_a_node_that_is_gone_is_an_error_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be fetched from its node"):
        resolve_model(str(SharedFolder(tmp_path, "ab" * 28)))
    assert ray.is_initialized()
