"""The lossless adapter: low-rank weights that act at mask positions only and leave the base model unchanged."""
