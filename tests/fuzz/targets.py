"""What must hold of the core for whatever bytes come: one function per part, given to the fuzzer.

Each raises ``AssertionError`` where it does not hold; any other exception is a fault as well.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

from proxy.core.content_coding import PIECE_BYTES, InflateError, Inflater
from proxy.core.corrector import Corrector, Mode
from proxy.core.event_stream import EventStreamDecoder
from proxy.core.json_edit import NotAnObjectError, member_spans, remove_member, set_member
from proxy.core.responses import COMPLETED, TERMINAL_NAMES
from tests.sse import Interpreter, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_BOM = b"\xef\xbb\xbf"
_MOST_CUTS = 8
_SMALLEST_LIMIT = 4


def check(data: bytes) -> None:
    """Check one input: a byte that picks the part, a few that say where to cut, the text."""
    if not data:
        return
    count = data[0] // len(_PARTS) % (_MOST_CUTS + 1)
    places, text = data[1 : 1 + count], data[1 + count :]
    chunks = cut(text, *(place * len(text) // 255 for place in places))
    _PARTS[data[0] % len(_PARTS)](text, chunks)


def seed(part: str, text: bytes, places: bytes = b"") -> bytes:
    """Write the input that gives ``text`` to a part, cut at ``places`` (in 255ths)."""
    names = [function.__name__ for function in _PARTS]
    return bytes([names.index(part) + len(places) * len(_PARTS)]) + places + text


def event_stream(text: bytes, chunks: list[bytes]) -> None:
    """However it is cut, no byte is lost, and a client reads the same events."""
    whole = text.removeprefix(_BOM)
    read, joined, rest = _decode([text], EventStreamDecoder())
    cut_read, cut_joined, cut_rest = _decode(chunks, EventStreamDecoder())
    assert joined + rest == cut_joined + cut_rest
    assert joined + rest in (whole, text if _BOM.startswith(text) else whole)
    assert read.events == cut_read.events
    limit = _SMALLEST_LIMIT + len(text) % 60
    limited = EventStreamDecoder(limit)
    out = b""
    for chunk in chunks:
        out += b"".join(limited.feed(chunk))
        assert len(limited.rest) <= limit
    assert out + limited.take_rest() == joined + rest


def corrector(text: bytes, chunks: list[bytes]) -> None:
    """The cutting changes nothing; only a terminal event does, and in it only its name."""
    whole, pieces, observer = Corrector(), Corrector(), Corrector(Mode.OBSERVE)
    out = whole.feed(text) + whole.finish()
    assert b"".join(map(pieces.feed, chunks)) + pieces.finish() == out
    assert [observer.feed(chunk) for chunk in chunks] == chunks
    assert _judged(pieces) == _judged(whole)
    assert observer.terminal is None or _judged(observer) == _judged(whole)
    assert pieces.response == whole.response
    assert pieces.last_sequence_number == whole.last_sequence_number
    if whole.terminal is None:
        assert text.removeprefix(_BOM).startswith(out)
        failure = whole.fail("It was lost.")
        assert bool(failure) is (whole.response is not None)
        assert not failure or json.loads(_read([failure]).events[-1]["data"])["response"]
        return
    assert whole.terminal.name in TERMINAL_NAMES
    assert not whole.fail("It was lost.")
    before, after = (_read([data]).events for data in (text + b"\n\n", out))
    for came, sent in zip(before, after, strict=False):
        if came == sent:
            continue
        if not whole.terminal.corrected:
            assert whole.dropped_events
            break
        assert came["event"] in (sent["event"], COMPLETED)
        old, new = json.loads(came["data"]), json.loads(sent["data"])
        assert old | {"type": None} == new | {"type": None}
        break


def json_edit(text: bytes, chunks: list[bytes]) -> None:
    """What is taken for an object is what Python's parser reads; an edit changes one value."""
    parsed = _object(text)
    try:
        spans = member_spans(text)
    except NotAnObjectError:
        assert parsed is None
        return
    assert parsed is not None
    if any("\ud800" <= character <= "\udfff" for key in parsed for character in key):
        return  # keys that no text can hold are read as U+FFFD, and nobody asks for them
    assert {key: json.loads(text[begin:end]) for key, (begin, end) in spans.items()} == parsed
    for key in [*spans, "new"]:
        edited = set_member(text, key, b"[0]")
        assert json.loads(edited) == {**parsed, key: [0]}
        if key in spans:
            begin, end = spans[key]
            assert edited == text[:begin] + b"[0]" + text[end:]
        left = {name: value for name, value in parsed.items() if name != key}
        assert json.loads(remove_member(text, key)) == left


def inflated(text: bytes, chunks: list[bytes]) -> None:
    """Compressed text comes out as it went in; whatever else comes is an error or is bounded."""
    kinds = (
        (b"deflate", zlib.MAX_WBITS),
        (b"gzip", 16 + zlib.MAX_WBITS),
        (b"deflate", -zlib.MAX_WBITS),
    )
    for coding, wbits in kinds:
        encoder = zlib.compressobj(wbits=wbits)
        packed = [encoder.compress(chunk) for chunk in chunks] + [encoder.flush()]
        inflater = Inflater(coding)
        assert b"".join(b"".join(inflater.feed(piece)) for piece in packed) == text
        inflater.finish()
    inflater = Inflater(b"deflate")
    try:
        for chunk in chunks:
            assert all(len(piece) <= PIECE_BYTES for piece in inflater.feed(chunk))
        inflater.finish()
    except InflateError:
        pass


_PARTS: list[Callable[[bytes, list[bytes]], None]] = [event_stream, corrector, json_edit, inflated]


def _decode(
    chunks: Iterable[bytes], decoder: EventStreamDecoder
) -> tuple[Interpreter, bytes, bytes]:
    client = Interpreter()
    joined = b""
    for chunk in chunks:
        for block in decoder.feed(chunk):
            client.take(block)
            joined += block
    return client, joined, decoder.take_rest()


def _read(chunks: Iterable[bytes]) -> Interpreter:
    return _decode(chunks, EventStreamDecoder())[0]


def _judged(corrector: Corrector) -> tuple[object, ...] | None:
    """What was made of the terminal event; its bytes may lack the LF that came by itself."""
    terminal = corrector.terminal
    if terminal is None:
        return None
    return (terminal.says, terminal.name, terminal.status, terminal.contradiction)


def _object(text: bytes) -> dict[str, Any] | None:
    """Read a JSON object as Python does, which takes a few words that are no JSON."""

    def refuse(word: str) -> None:
        raise ValueError(word)

    try:
        parsed = json.loads(text.decode(), parse_constant=refuse)
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None
