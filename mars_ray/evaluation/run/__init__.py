"""An evaluation from its settings to its report."""
