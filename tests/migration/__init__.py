"""Tests of settings that come from other implementations."""
