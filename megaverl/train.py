"""``python -m megaverl.train CONFIG key=value ...`` is ``megaverl train CONFIG key=value ...``."""

import sys

from megaverl.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
