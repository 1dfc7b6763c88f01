"""Tell up to which length the rotary embedding of a model stays as it is."""

from transformers import PretrainedConfig


def constant_rotary_length(text: PretrainedConfig) -> int:
    """Return the maximum length of a sequence whose rotary embedding is that of shorter sequences.

    LongRoPE has other frequencies beyond its original length. They would not fit the keys that are already in the
    cache, nor the other sequences of a step.
    """
    length: int = text.max_position_embeddings
    rotary = getattr(text, "rope_parameters", None) or {}
    by_layer_type = [part for part in rotary.values() if isinstance(part, dict)]
    for part in (rotary, *by_layer_type):
        if part.get("rope_type") == "longrope":
            length = min(length, part["original_max_position_embeddings"])
    return length
