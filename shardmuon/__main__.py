"""`python -m shardmuon`: the commands of `shardmuon.tools`."""

import sys

from shardmuon.tools.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
