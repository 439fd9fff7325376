"""``python -m hf_spec`` is ``hf-spec``, for launchers that start modules."""

import sys

from .cli import main

sys.exit(main())
