"""Runs that are killed, told to stop or find damaged files, and what is left of them."""
