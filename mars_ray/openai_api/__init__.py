"""OpenAI's HTTP API as types and pure functions: requests read, refusals and answers written."""
