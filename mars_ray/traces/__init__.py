"""Traces: the times of requests and rows as OpenTelemetry spans, sent over OTLP."""
