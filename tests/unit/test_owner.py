"""Whose a copy is: a keyed hash of the headers that tell users apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.background.owner import Owners

SECRET = b"s" * 32
AUTH = b"authorization"
Pairs = list[tuple[bytes, bytes]]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        pytest.param([(AUTH, b"a")], [(AUTH, b"a")], True, id="same"),
        pytest.param([(AUTH, b"a")], [(b"x", b"1"), (AUTH, b"a"), (b"y", b"2")], True, id="others"),
        pytest.param([], [(b"cookie", b"a")], True, id="anonymous"),
        pytest.param([(AUTH, b"a")], [(AUTH, b"b")], False, id="value"),
        pytest.param([(AUTH, b"a")], [(AUTH, b"A")], False, id="case"),
        pytest.param([(AUTH, b"")], [], False, id="empty is not none"),
        pytest.param([(AUTH, b"a")], [(AUTH, b"a"), (AUTH, b"a")], False, id="twice"),
        pytest.param([(AUTH, b"a"), (AUTH, b"b")], [(AUTH, b"ab")], False, id="joined"),
        pytest.param([(AUTH, b"a")], [(b"x-team", b"a")], False, id="name"),
        pytest.param(
            [(AUTH, b"a"), (b"x-team", b"b")], [(b"x-team", b"b"), (AUTH, b"a")], True, id="order"
        ),
        pytest.param(
            [(AUTH, b"a"), (b"x-team", b"b")], [(AUTH, b"b"), (b"x-team", b"a")], False, id="swap"
        ),
    ],
)
def test_who_is_the_same(one: Pairs, other: Pairs, same: bool) -> None:  # noqa: FBT001
    """The values of the named headers decide, all of them, and nothing else."""
    owners = Owners([AUTH, b"x-team"], SECRET)
    assert (owners.owner_of(one) == owners.owner_of(other)) is same


def test_hash_tells_nothing() -> None:
    """It is hex, holds no key, and is another one under another secret."""
    pairs = [(AUTH, b"Bearer sk-secret")]
    owner = Owners([AUTH], SECRET).owner_of(pairs)
    assert len(bytes.fromhex(owner)) == 32
    assert "secret" not in owner
    assert owner != Owners([AUTH], b"t" * 32).owner_of(pairs)
    assert owner == Owners([AUTH], SECRET).owner_of(pairs)


@given(st.lists(st.binary(max_size=4), max_size=3), st.lists(st.binary(max_size=4), max_size=3))
def test_no_two_requests_collide(one: list[bytes], other: list[bytes]) -> None:
    """However values are cut, different ones are different owners."""
    owners = Owners([AUTH], SECRET)
    told = [owners.owner_of([(AUTH, value) for value in values]) for values in (one, other)]
    assert (told[0] == told[1]) is (one == other)
