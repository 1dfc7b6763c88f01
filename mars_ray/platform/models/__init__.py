"""Several models behind one endpoint: their registry and their engines."""
