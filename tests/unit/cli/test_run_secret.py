"""The secret that one `tandem serve` makes for itself."""

from __future__ import annotations

import pytest

from tandem.cli.run_secret import run_secret
from tandem.wire.secret_file import SecretFile


def test_it_is_another_each_time_readable_by_its_owner_alone_and_gone_afterwards() -> None:
    with run_secret() as first, run_secret() as second:
        assert first.stat().st_mode & 0o777 == 0o600 and first.parent.stat().st_mode & 0o777 == 0o700
        (one,), (other,) = SecretFile(first).current(0.0), SecretFile(second).current(0.0)
        assert one != other and len(one) == 64
    assert not first.parent.exists() and not second.parent.exists()


def test_it_is_gone_when_the_start_fails_too() -> None:
    with pytest.raises(KeyboardInterrupt), run_secret() as path:
        raise KeyboardInterrupt
    assert not path.parent.exists()
