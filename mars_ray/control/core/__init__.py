"""The controller: reports of all replicas in, a directive for each out."""
