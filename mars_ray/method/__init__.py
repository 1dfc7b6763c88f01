"""The MARS method in plain torch: streams, visibility, loss, acceptance, and a slow reference decoder."""
