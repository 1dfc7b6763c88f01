"""Anthropic's Messages API: types and pure functions over the chat requests of `openai_api`."""
