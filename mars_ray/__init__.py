"""Multi-token language models on Ray: train with MARS, decode with one confidence threshold."""
