"""From logits to accepted tokens: the sampler, proposals, verification."""
