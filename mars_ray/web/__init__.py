"""Pages for people: the playground, the live view of a cluster, and the style sheet that reports share with them."""
