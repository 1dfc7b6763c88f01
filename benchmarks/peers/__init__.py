"""Other engines on the same model, prompts, lengths, threads and bits, in turns with ours."""
