"""Torch-free planning: which rank owns which matrix, in which bucket, and what travels where.

Everything here is a pure function of names, shapes and mesh ranks, so that a plan for a thousand
ranks is made and tested without a process group. Nothing here may import torch.
"""
