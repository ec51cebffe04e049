"""``python -m memcalc``."""

import sys

from memcalc.cli.main import main

sys.exit(main())
