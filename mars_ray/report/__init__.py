"""What HTML reports share: the page, its look, and small charts."""
