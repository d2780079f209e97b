"""Fixtures of the tests of transport security."""

from tests.support.security_fixtures import authority, model

__all__ = ["authority", "model"]
