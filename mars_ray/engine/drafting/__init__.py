"""Drafts from text: what a sequence probably copies from its prompt, its answer, or its owner's recent answers."""
