"""Who is fed what in the next step: sequences, the waiting queue, the scheduler."""
