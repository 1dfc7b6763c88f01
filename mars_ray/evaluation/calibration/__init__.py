"""What each threshold gives on a model, measured for its card."""
