"""The Responses API: its requests, events and items, and the store of its responses."""
