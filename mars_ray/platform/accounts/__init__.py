"""Keys with accounts and limits, tokens of identity providers, and the routes that manage them."""
