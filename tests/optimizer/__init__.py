"""Tests of the optimizer: rule, state, settings, routing, plan."""
