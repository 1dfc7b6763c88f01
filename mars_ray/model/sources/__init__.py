"""Sources of models: a hub, a store, another node, a .gguf file, a package. Each gives a folder in a cache."""
