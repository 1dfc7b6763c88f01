"""Where models come from: a hub, a .gguf file, a package; each ends as a folder in a cache."""
