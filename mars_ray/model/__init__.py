"""Hugging Face decoder folders: check, load, save, the mask token, and the card that says how one was trained."""
