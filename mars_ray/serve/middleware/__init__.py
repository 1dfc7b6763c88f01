"""What a request passes before a route sees it: hosts, keys, limits, bodies. Plain ASGI."""
