"""Sources of models: a hub, a store, another node, a .gguf file, a package. Each source provides a cached folder."""
