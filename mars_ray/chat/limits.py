"""Maximum sizes of a conversation. They bound the time of its checks, during which other callers wait."""

MESSAGES_MAX = 4096
"""Maximum messages of one conversation."""

PARTS_MAX = 4096
"""Maximum parts in the content of one message."""

TOOLS_MAX = 1024
"""Maximum tools of one conversation."""

CALLS_MAX = 4096
"""Maximum tool calls in the messages of one conversation."""
