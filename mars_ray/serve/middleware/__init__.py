"""Checks before a request reaches a route: hosts, keys, limits and bodies. Plain ASGI."""
