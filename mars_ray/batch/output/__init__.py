"""Output folder of a job: ledger, shards, history and report."""
