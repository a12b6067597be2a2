"""shardmuon inside the frameworks people train with: the real packages, on CPU ranks over gloo."""
