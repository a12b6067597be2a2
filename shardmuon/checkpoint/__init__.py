"""Resumable checkpoints: folders that appear by one rename and hold tensors and one JSON file.

Knows models and optimizers only through torch's state-dict functions, and must not know how a
training run is configured: what else has to be remembered comes in as JSON values.
"""
