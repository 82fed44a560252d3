"""A response's body on its way into the client's transport."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from proxy.gateway.body_writer import BodyWriter

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from proxy.gateway.protocol import LastwordProtocol

CHUNK = b"5\r\nhello\r\n"


class Stand:
    """Protocol, cycle, transport and loop at once: all that a writer knows of them."""

    def __init__(self, *, chunked: bool, method: str = "POST") -> None:
        self.written: list[bytes] = []
        self.transport = self.loop = self.message_event = self.writers = self
        self.scope = {"method": method}
        self.chunked_encoding = chunked
        self.disconnected = self.response_complete = False
        self.keep_alive = True
        self.writer = BodyWriter(
            cast("LastwordProtocol", self), cast("RequestResponseCycle", self), b"/"
        )
        self.writer.start(has_length=False)
        self.flow = SimpleNamespace(write_paused=False)

    def write(self, data: bytes) -> None:
        """Take bytes as the transport."""
        self.written.append(data)

    def time(self) -> float:
        """Tell the loop's time."""
        return 1.0

    def set(self) -> None:
        """Be told as the cycle's event."""

    def discard(self, writer: BodyWriter) -> None:
        """Be told as the protocol's writers."""
        assert writer is self.writer

    def on_response(self) -> None:
        """Be told as the cycle."""


@pytest.mark.parametrize(("chunked", "written"), [(True, CHUNK), (False, b"hello")])
def test_a_chunk_keeps_its_framing_where_there_is_framing(*, chunked: bool, written: bytes) -> None:
    """A client of HTTP/1.0 gets the data alone."""
    stand = Stand(chunked=chunked)
    stand.writer.write_http_chunk(CHUNK, 5, 2.0)
    assert stand.written == [written]
    assert stand.writer.written_at == 2.0


@pytest.mark.parametrize("over", ["end", "lose"])
def test_nothing_is_written_behind_the_end(over: str) -> None:
    """A body that is whole, or whose client is gone, takes no more in any way."""
    stand = Stand(chunked=True)
    getattr(stand.writer, over)()
    written = list(stand.written)
    stand.writer.write(b"hello")
    stand.writer.write_http_chunk(CHUNK, 5, 2.0)
    assert stand.written == written
    assert stand.writer.written_at == 1.0


def test_an_answer_to_head_has_no_body() -> None:
    """Whatever upstream sends."""
    stand = Stand(chunked=True, method="HEAD")
    stand.writer.write_http_chunk(CHUNK, 5, 2.0)
    assert stand.written == []
