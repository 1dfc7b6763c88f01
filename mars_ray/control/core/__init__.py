"""The controller, which answers each report with a directive, and the lease by which a replica follows it."""
