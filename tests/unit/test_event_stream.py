"""Bytes to whole events: the grammar of WHATWG HTML 9.2.5 and 9.2.6."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from proxy.core import event_stream
from proxy.core.event import encode_event, fields, parse_event
from proxy.core.event_stream import EventStreamDecoder, Fragment
from proxy.core.held_bytes import HeldBytes
from tests.sse import cut, interpret, one_by_one

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "sse_cases.json").read_text()
)


def _as_the_case_says(case: dict[str, Any], data: bytes) -> list[bytes]:
    sizes = case.get("chunk_sizes")
    if not sizes:
        return [data]
    chunks: list[bytes] = []
    position = 0
    while position < len(data):
        size = sizes[min(len(chunks), len(sizes) - 1)]
        chunks.append(data[position : position + size])
        position += size
    return chunks


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
@pytest.mark.parametrize("cutting", ["case", "bytes", "every cut"])
def test_case(case: dict[str, Any], cutting: str) -> None:
    """Every case dispatches the events that the standard says, however it is cut."""
    data = base64.b64decode(case["bytes"])
    ways = {
        "case": [_as_the_case_says(case, data)],
        "bytes": [one_by_one(data)],
        "every cut": [cut(data, place) for place in range(min(len(data), 2_000))],
    }
    for chunks in ways[cutting]:
        found = interpret(chunks)

        assert case["expected"] == found.events
        assert case["retry_ms"] == found.retry_ms
        assert case["last_event_id_at_end"] == found.last_event_id


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_no_byte_is_lost(case: dict[str, Any]) -> None:
    """Blocks and the rest are the stream, but for a BOM at its start."""
    data = base64.b64decode(case["bytes"])
    for chunks in ([data], one_by_one(data)):
        decoder = EventStreamDecoder()
        out = b"".join(b"".join(decoder.feed(chunk)) for chunk in chunks) + decoder.take_rest()

        assert data.removeprefix(b"\xef\xbb\xbf") == out


@pytest.mark.parametrize(
    ("data", "blocks"),
    [
        pytest.param(b"data: 1\n\ndata: 2\n\n", [b"data: 1\n\n", b"data: 2\n\n"], id="LF"),
        pytest.param(
            b"data: 1\r\n\r\ndata: 2\r\n\r\n", [b"data: 1\r\n\r\n", b"data: 2\r\n\r\n"], id="CRLF"
        ),
        pytest.param(b"data: 1\r\rdata: 2\r\r", [b"data: 1\r\r", b"data: 2\r\r"], id="CR"),
        pytest.param(
            b"data: 1\r\n\ndata: 2\n\r\n", [b"data: 1\r\n\n", b"data: 2\n\r\n"], id="mixed"
        ),
        pytest.param(b"data: 1\n\rdata: 2\n\n", [b"data: 1\n\r", b"data: 2\n\n"], id="LF CR"),
        pytest.param(
            b": c\n\n\n\ndata: 1\n\n", [b": c\n\n", b"\n", b"\n", b"data: 1\n\n"], id="blank"
        ),
        pytest.param(
            b"data: 1\r\ndata: 2\r\n\r\n", [b"data: 1\r\ndata: 2\r\n\r\n"], id="two lines"
        ),
    ],
)
def test_blocks(data: bytes, blocks: list[bytes]) -> None:
    """A block ends with its blank line, whichever line ends it is made of."""
    assert blocks == EventStreamDecoder().feed(data)


@pytest.mark.parametrize("ending", [b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r", b"\r\n\r"])
def test_event_is_whole_with_the_last_byte_of_its_blank_line(ending: bytes) -> None:
    """An event is never handed out later than its blank line's LF or CR, nor earlier."""
    data = b"data: 1" + ending
    whole_at = len(data) - (1 if ending.endswith(b"\r\n") else 0)
    decoder = EventStreamDecoder()
    arrived = [b"".join(decoder.feed(byte)) for byte in one_by_one(data)]

    assert [b""] * (whole_at - 1) == arrived[: whole_at - 1]
    assert data[:whole_at] == arrived[whole_at - 1]
    assert data == b"".join(arrived)


def test_lf_after_the_cr_of_a_blank_line_belongs_to_it() -> None:
    """An LF that comes later than its CR is no blank line of the next event."""
    decoder = EventStreamDecoder()

    assert decoder.feed(b"data: 1\r\n\r") == [b"data: 1\r\n\r"]
    assert decoder.feed(b"\n") == [b"\n"]
    assert decoder.feed(b"data: 2\r") == []
    assert decoder.feed(b"\n") == []
    assert decoder.feed(b"\n") == [b"data: 2\r\n\n"]


def test_bom_is_kept_on_request() -> None:
    """A recorded stream is not to lose its BOM."""
    assert EventStreamDecoder(keep_bom=True).feed(b"\xef\xbb\xbfdata: 1\n\n") == [
        b"\xef\xbb\xbfdata: 1\n\n"
    ]


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("ending", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_overlong_event_passes_in_fragments(size: int, ending: bytes) -> None:
    """Of an event over the limit nothing is lost, and what is held stays within the limit."""
    long = b"data: " + b"x" * 5_000 + ending
    data = b"data: 1\n\n" + long + b"data: 2\n\n"
    decoder = EventStreamDecoder(max_event_bytes=1_000)
    out: list[bytes] = []
    for position in range(0, len(data), size):
        out += decoder.feed(data[position : position + size])
        assert len(decoder.rest) <= 1_000

    assert data == b"".join(out)
    assert decoder.overlong_events == 1
    judged = [block for block in out if not isinstance(block, Fragment) and block != b"\n"]
    assert judged == [b"data: 1\n\n", b"data: 2\n\n"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_large_blocks_are_cut_the_same(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handed over in the decoder's own buffer or copied: the same blocks, the same bytes."""
    data = base64.b64decode(case["bytes"])
    for chunks in ([data], _as_the_case_says(case, data), one_by_one(data)):
        monkeypatch.setattr(event_stream, "LARGE_BYTES", len(data) + 1)
        small = EventStreamDecoder()
        expected = [(small.cut(chunk), small.plain) for chunk in chunks]
        monkeypatch.setattr(event_stream, "LARGE_BYTES", 1)
        large = EventStreamDecoder()
        assert [(large.cut(chunk), large.plain) for chunk in chunks] == expected
        assert large.take_rest() == small.take_rest()


def test_a_large_block_is_handed_over() -> None:
    """It comes in the buffer that has gathered it, which is the decoder's no more."""
    account = HeldBytes(1 << 30)
    decoder = EventStreamDecoder(share=account.share())
    large = b"data: %b\r\n\r" % (b"x" * event_stream.LARGE_BYTES)
    half = b"data: 1\n"
    assert decoder.cut(large[:-9]) == []
    assert account.held >= len(large) - 9
    (block,) = decoder.cut(large[-9:])
    assert isinstance(block, bytearray)
    assert account.held == 0
    assert decoder.cut(b"\n" + half) == [b"\n"]
    assert block == large
    assert decoder.cut(b"\n" + large) == [half + b"\n", large]
    assert type(decoder.feed(b"\n" + large)[1]) is bytes
    assert decoder.cut(b"\n" + half + b"\n") == [b"\n", half + b"\n"]
    (block,) = decoder.cut(large.replace(b"\r\n\r", b"\n\n"))
    assert isinstance(block, bytearray)
    assert decoder.cut(half + b"\n") == [half + b"\n"]


def test_fields() -> None:
    """The first colon separates, one space goes, comments are no fields."""
    block = b": c\nevent: a\ndata:b:c\ndata\ndata:  d\n\n"
    found = [(name, block[begin:end]) for name, begin, end in fields(block)]

    assert found == [(b"event", b"a"), (b"data", b"b:c"), (b"data", b""), (b"data", b" d")]


def test_payload_and_place() -> None:
    """Every byte of the joined payload is found again in the block."""
    event = parse_event(b'event: x\r\ndata: {"a":\r\n: hb\r\ndata:1}\r\nid: 7\r\n\r\n')
    payload = event.payload()

    assert payload == b'{"a":\n1}'
    assert event.has_id
    assert event.name_value == b"x"
    for offset, byte in enumerate(payload):
        if byte != ord("\n"):
            assert event.raw[event.place(offset)] == byte
    with pytest.raises(IndexError):
        event.place(len(payload) + 1)


def test_encode_event_over_several_lines() -> None:
    """A payload with line ends in it is read back as it was."""
    assert parse_event(encode_event(b"x", b'{"a":\n1}')).payload() == b'{"a":\n1}'
