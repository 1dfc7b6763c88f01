"""The demo: a comparison of three settings on the bundled model, and races of all settings on one prompt."""
