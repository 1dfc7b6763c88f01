"""Scheduling: sequences, the waiting queue, the scheduler, detokenization."""
