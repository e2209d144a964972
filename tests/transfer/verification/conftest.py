"""The wrong strategies of these tests, registered while a test runs."""

import pytest

from tests.transfer.verification import strategies
from transfer import register_strategy, unregister_strategy


@pytest.fixture
def wrong(monkeypatch):
    """The strategies, registered; what a test sets on the classes is taken back."""
    kinds = (strategies.Flips, strategies.ForgetsToWait, strategies.WritesNaNs, strategies.LosesSigns)
    for kind in kinds:
        register_strategy(kind.name, kind)

    class Settings:
        @staticmethod
        def flips(*indexes, bit=0):
            monkeypatch.setattr(strategies.Flips, "wrong", indexes)
            monkeypatch.setattr(strategies.Flips, "bit", bit)

        @staticmethod
        def nans_become(value):
            monkeypatch.setattr(strategies.WritesNaNs, "instead", value)

    yield Settings
    for kind in kinds:
        unregister_strategy(kind.name)
