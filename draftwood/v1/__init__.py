"""The wire contract, generated from protos/ by `make protos`."""
