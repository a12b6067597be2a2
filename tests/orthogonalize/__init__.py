"""Newton-Schulz: coefficients, methods, measures."""
