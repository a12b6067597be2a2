"""What `train.py` runs: configuration, data, model, loop and metrics.

Knows the optimizer only as an optimizer. Importing this package imports no torch, so that bad
input is refused in milliseconds and before any process group exists.
"""
