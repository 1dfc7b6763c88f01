"""Prompts that ask a model to fill in the middle between a prefix and a suffix (arXiv 2207.14255)."""

from collections.abc import Container

from mars_ray.errors import RequestError

INFILL_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""Texts of the tokens before the prefix, before the suffix and before the middle: of Qwen, of StarCoder and models
like it, and of DeepSeek."""

InfillMarkers = tuple[str, str, str]


def infill_markers(vocabulary: Container[str]) -> InfillMarkers | None:
    """Return the markers that a vocabulary has; None if the model cannot fill in the middle."""
    return next((markers for markers in INFILL_MARKERS if all(marker in vocabulary for marker in markers)), None)


def infill_prompt(markers: InfillMarkers | None, prefix: str, suffix: str) -> str:
    """Return the prompt whose answer stands between `prefix` and `suffix`. Raises `RequestError` without markers."""
    if markers is None:
        raise RequestError("this model cannot fill in the middle; leave out suffix.", param="suffix")
    before, between, end = markers
    return f"{before}{prefix}{between}{suffix}{end}"
