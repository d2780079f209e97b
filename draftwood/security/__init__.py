"""Who may talk to whom: certificates, shared tokens."""
