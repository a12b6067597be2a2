"""The version of the library, alone in a file so that any part may read it."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
