"""`mars-ray bench policy`: policies side by side on the same traces."""
