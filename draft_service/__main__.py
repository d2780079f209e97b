"""`python -m draft_service`: reads the flags and serves until SIGTERM or Ctrl-C."""

from __future__ import annotations

import sys

from draftwood.interrupt import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt("draft service")
    from draft_service.server import main  # takes seconds

    sys.exit(main(sys.argv[1:]))
