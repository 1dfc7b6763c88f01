"""The controller: it takes the reports of all replicas and answers each with a directive."""
