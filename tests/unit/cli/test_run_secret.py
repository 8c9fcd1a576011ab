"""Test the secret that `tandem serve` makes for one run."""

from __future__ import annotations

import pytest

from tandem.cli.run_secret import run_secret
from tandem.wire.secret_file import SecretFile


def test_each_secret_is_new_private_and_removed_afterwards() -> None:
    with run_secret() as first, run_secret() as second:
        assert first.stat().st_mode & 0o777 == 0o600 and first.parent.stat().st_mode & 0o777 == 0o700
        (secret,), (other,) = SecretFile(first).current(0.0), SecretFile(second).current(0.0)
        assert secret != other and len(secret) == 64
    assert not first.parent.exists() and not second.parent.exists()


def test_the_secret_is_removed_when_the_start_fails_too() -> None:
    with pytest.raises(KeyboardInterrupt), run_secret() as path:
        raise KeyboardInterrupt
    assert not path.parent.exists()
