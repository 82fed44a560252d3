"""One account over everything that may grow."""

from __future__ import annotations

from proxy.core.corrector import Corrector
from proxy.core.held_bytes import HeldBytes

KIB = 1024
LONG = b"data: " + b"x" * 200 * KIB


def test_a_share_asks_and_gives_back() -> None:
    """What does not fit changes nothing; what is there already is counted all the same."""
    account = HeldBytes(100)
    with account.share() as one, account.share() as other:
        assert one.ask(60)
        assert not other.ask(41)
        assert other.ask(40)
        assert (account.held, one.size, other.size) == (100, 60, 40)
        other.add(7)
        assert account.held == 107
        one.close()
        one.close()
        assert account.held == 47
    assert account.held == 0


def test_a_long_half_event_is_put_to_account() -> None:
    """A short one costs nothing; a long one counts while it is held, and no longer."""
    account = HeldBytes(10_000 * KIB)
    corrector = Corrector(share=account.share())
    corrector.feed(b"data: short")
    assert account.held == 0
    corrector.feed(LONG)
    assert 200 * KIB < account.held < 300 * KIB
    assert corrector.feed(b"\n\n").endswith(b"x\n\n")
    assert account.held == 0
    corrector.feed(LONG)
    corrector.close()
    assert account.held == 0
    assert corrector.overlong_events == 0


def test_a_half_event_without_room_passes_in_parts() -> None:
    """Not a byte is lost, little is held, and the next event is looked at again."""
    account = HeldBytes(100 * KIB)
    corrector = Corrector(share=account.share())
    end = b'data: {"type":"response.completed","response":{"id":"r","status":"failed"}}\n\n'
    out = b""
    for at in range(0, len(LONG), 1000):
        out += corrector.feed(LONG[at : at + 1000])
        assert account.held <= 100 * KIB
        assert len(corrector._decoder.rest) <= 100 * KIB
    assert len(out) > 100 * KIB
    out += corrector.feed(b"\n\n" + end)
    assert out == LONG + b"\n\n" + end.replace(b"response.completed", b"response.failed")
    assert (corrector.overlong_events, account.held) == (1, 0)


def test_all_streams_share_one_account() -> None:
    """One stream's half event leaves the others less; when it has ended, they have it back."""
    account = HeldBytes(300 * KIB)
    one, other = (Corrector(share=account.share()) for _ in range(2))
    assert one.feed(LONG) == b""
    assert other.feed(LONG) != b""
    one.feed(b"\n\n")
    other.feed(b"\n\n")
    assert other.feed(LONG) == b""
    assert (one.overlong_events, other.overlong_events) == (0, 1)


def test_an_endless_line_is_never_held_beyond_its_limit() -> None:
    """Also with room for more, and whatever the reads are."""
    account = HeldBytes(10_000 * KIB)
    for size in (1000, 64 * KIB, 256 * KIB):
        corrector = Corrector(max_event_bytes=500 * KIB, share=account.share())
        passed = 0
        for _ in range(5_000 * KIB // size):
            passed += len(corrector.feed(b"y" * size))
            assert len(corrector._decoder.rest) <= 500 * KIB
        assert passed >= 4_000 * KIB
        assert account.held == 0
        assert not corrector.between_events
