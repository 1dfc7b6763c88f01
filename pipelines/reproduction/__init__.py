"""The paper's claims and every baseline at one budget."""
