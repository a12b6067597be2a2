"""Newton-Schulz on whole matrices, on one rank. Knows nothing of ranks, shards or plans."""
