"""Shapes of the matrices of well-known models, for benchmarks and plans without weights.

Owns the named lists. Attention and MLP projections only: embeddings, heads, routers and norms take
AdamW. Sizes are those of the models' public configurations.
"""

from __future__ import annotations

__all__ = ["MODELS", "Shapes"]

Shapes = tuple[tuple[int, int, int], ...]
"""(how many, rows, cols), one entry per kind of matrix."""


def _llama(layers: int, dim: int, kv: int, ffn: int) -> Shapes:
    attention = ((2 * layers, dim, dim), (2 * layers, kv, dim))
    return (*attention, (2 * layers, ffn, dim), (layers, dim, ffn))


MODELS: dict[str, Shapes] = {
    "gpt2-124m": ((12, 2304, 768), (12, 768, 768), (12, 3072, 768), (12, 768, 3072)),
    "llama3-1b": _llama(16, 2048, 512, 8192),
    "llama3-8b": _llama(32, 4096, 1024, 14336),
    "llama3-70b": _llama(80, 8192, 1024, 28672),
    # 48 layers; every one of 128 experts is three matrices.
    "qwen3-30b-a3b": (
        (48, 4096, 2048),
        (96, 512, 2048),
        (48, 2048, 4096),
        (2 * 48 * 128, 768, 2048),
        (48 * 128, 2048, 768),
    ),
}
