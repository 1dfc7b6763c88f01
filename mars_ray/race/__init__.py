"""A race: one prompt at three settings, each decoded alone, and shown side by side."""
