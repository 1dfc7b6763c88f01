"""Usage of keys and accounts: limits at admission, exact counts, reports."""
