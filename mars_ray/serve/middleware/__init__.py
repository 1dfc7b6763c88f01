"""Checks before a request reaches a route: hosts, keys, limits, bodies. Plain ASGI."""
