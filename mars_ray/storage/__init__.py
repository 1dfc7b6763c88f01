"""Places by path or URL: a disk and an object store alike."""
