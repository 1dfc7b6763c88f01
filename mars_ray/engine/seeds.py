"""A seed for each thing that is sampled: with one for all, all would draw the same numbers."""

from hashlib import blake2b


def seed_of(name: str) -> int:
    """Return a seed, below 2**63, that the name alone decides."""
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()) >> 1
