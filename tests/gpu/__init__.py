"""Tests that need a GPU; skipped, and counted, elsewhere."""
