"""Derive a different seed for each sampled answer, because equal seeds would give equal samples."""

from hashlib import blake2b


def seed_of(name: str) -> int:
    """Return a seed below 2**63 that depends on `name` only."""
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()) >> 1
