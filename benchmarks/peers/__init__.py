"""Compare other engines with ours on the same model, prompts, lengths, threads and bits, in turns."""
