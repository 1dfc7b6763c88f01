"""Several models behind one endpoint: their registry, canaries, sleep and memory."""
