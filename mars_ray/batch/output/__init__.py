"""The output folder of a job: ledger, shards, history, report."""
