"""The demo: three settings compared on the bundled model, and races of one prompt at all settings."""
