"""Settings and state of other Muon implementations, as settings and state of `shardmuon.Muon`.

Owns what others call things, their defaults, and where their arithmetic differs from ours. Changes
no rule: what cannot be said with our settings is a ValueError.
"""

from shardmuon.migration.settings import Migration as Migration
from shardmuon.migration.sources import from_dion as from_dion
from shardmuon.migration.sources import from_emerging_optimizers as from_emerging_optimizers
from shardmuon.migration.sources import from_keller as from_keller
from shardmuon.migration.sources import from_megatron as from_megatron
from shardmuon.migration.sources import from_moonlight as from_moonlight
from shardmuon.migration.sources import from_torch as from_torch
from shardmuon.migration.sources import keller_groups as keller_groups

__all__ = [
    "Migration",
    "from_dion",
    "from_emerging_optimizers",
    "from_keller",
    "from_megatron",
    "from_moonlight",
    "from_torch",
    "keller_groups",
]
