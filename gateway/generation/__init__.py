"""A request carried out: what is asked of the verify service, and what comes back."""
