"""The Responses API and the store of its responses."""
