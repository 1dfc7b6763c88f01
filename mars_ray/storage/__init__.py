"""Files on disks and in object stores, by path or URL."""
