"""Tests of saved state: checkpoints and conversions."""
