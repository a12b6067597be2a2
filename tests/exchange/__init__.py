"""Tests of what ranks do together: layouts, traffic, faults, saved state."""
