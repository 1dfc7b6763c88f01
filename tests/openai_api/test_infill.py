"""Models that can fill in the middle get a prompt in their own form."""

import pytest

from mars_ray.openai_api.infill import INFILL_MARKERS, infill_markers, infill_prompt


@pytest.mark.parametrize("markers", INFILL_MARKERS)
def test_the_suffix_stands_between_the_models_own_markers(markers: tuple[str, str, str]) -> None:
    assert infill_markers({*markers, "a", "b"}) == markers
    before, between, end = markers
    assert infill_prompt(markers, "a", "b") == f"{before}a{between}b{end}"


def test_a_vocabulary_with_some_of_the_markers_has_none() -> None:
    assert infill_markers({"<fim_prefix>", "<fim_suffix>"}) is None
