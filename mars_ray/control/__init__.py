"""Thresholds from cluster load: reports in, directives out."""
