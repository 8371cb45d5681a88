"""``python -m sglang_pd_guard``: the command ``pd-guard``."""

import sys

from sglang_pd_guard.cli.main import main

sys.exit(main())
