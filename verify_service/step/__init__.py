"""One step, draft to commit: what does not depend on the device."""
