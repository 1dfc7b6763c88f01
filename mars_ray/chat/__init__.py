"""Conversations in the form of OpenAI's chat API: messages, tools and calls, and what chat templates read of them."""
