"""An engine in a process of its own, and what passes between it and its owner."""
