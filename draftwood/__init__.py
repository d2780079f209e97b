"""What Draftwood's services share: the wire contract, trees, sampling, errors, configuration, and the command line."""

__version__ = "0.1.0"
