"""``python -m megaverl`` is the ``megaverl`` command."""

import sys

from megaverl.cli import main

if __name__ == "__main__":
    sys.exit(main())
