"""`python -m shardmuon`: the commands of `shardmuon.tools`."""

import sys

from shardmuon.tools.command import script

if __name__ == "__main__":
    sys.exit(script())
