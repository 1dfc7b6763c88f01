"""Model folders: find, check, load and save them, with the mask token and the card."""
