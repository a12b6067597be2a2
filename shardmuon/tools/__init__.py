"""Commands beside training: `python -m shardmuon NAME`."""
