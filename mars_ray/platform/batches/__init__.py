"""Files and batches of callers in a folder or an object store, and the runner that works on the batches."""
