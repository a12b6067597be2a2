"""Tests of planning: no ranks, no torch."""
