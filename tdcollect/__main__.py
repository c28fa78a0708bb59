"""``python -m tdcollect``: the command line."""

import sys

from tdcollect.cli import main

sys.exit(main())
