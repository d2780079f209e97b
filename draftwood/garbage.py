"""What the collector of reference cycles looks at."""

from __future__ import annotations

import atexit
import gc


def freeze_startup() -> None:
    """Takes everything alive out of the collector's sight, once a service is ready.

    Model, compiled steps and modules are hundreds of thousands of objects that live as long as the process. The oldest
    generation is collected only when a quarter as many have been added to it, and a call of grpc's aio servers is part
    of a cycle: some thousand ended calls, with all that they held, would stay in memory. Without them a full collection
    is also soon done.
    """
    gc.collect()
    gc.freeze()
    gc.collect()  # now the quarter is counted from zero
    atexit.register(gc.unfreeze)  # libraries whose bindings are frozen at the end complain of leaks
