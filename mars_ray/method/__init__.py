"""The MARS method in plain torch: streams, visibility, loss, acceptance, and the slow reference decoder."""
