"""The lossless adapter: low-rank weights that act only at mask positions and leave the base model unchanged."""
