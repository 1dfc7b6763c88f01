"""What a model gets right, and how many forwards it takes."""
