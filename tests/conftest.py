"""What all tests share: no network, and property tests that repeat."""

import os

from hypothesis import settings

# Before any import of transformers: tests take models from this repository or make them, never from a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

# Machines differ too much in speed for a deadline a case, and a failure must come back when the test is run again.
settings.register_profile("draftwood", deadline=None, derandomize=True)
settings.load_profile("draftwood")
