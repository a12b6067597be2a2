"""Tests of shardmuon, named by subject."""
