"""Find, check, load and save model folders, including the mask token and the card."""
