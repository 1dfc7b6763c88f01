"""The lossless adapter: low-rank weights at mask positions only, so that the base model stays itself."""
