"""Turn logits into accepted tokens: the sampler, proposals and verification."""
