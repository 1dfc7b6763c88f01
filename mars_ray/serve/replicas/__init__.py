"""Clients and metrics of the engines, and the choice of an engine for a request."""
