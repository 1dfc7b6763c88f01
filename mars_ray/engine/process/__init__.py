"""An engine in a child process, its client, and the messages between them."""
