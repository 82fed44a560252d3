"""A response's body as its reader sees it: pulled by iteration, or pushed into a sink."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Final

import httpx

if TYPE_CHECKING:
    from proxy.upstream.connection import Connection

# Unread bytes at which the socket is no longer read, and at which it is read again. A read brings
# up to 256 KiB, so about twice the first is held at most.
_FULL_BYTES: Final = 256 * 1024
_LOW_BYTES: Final = 64 * 1024


ChunkSink = Callable[[bytes], int]
"""Takes a read that may be one whole HTTP chunk (`proxy.core.http_chunk`), framing included.

Returns how many bytes of data the chunk holds, 0 if it was not taken: the parser has it then.
"""


class UpstreamStream(httpx.AsyncByteStream):
    """The body of one upstream response, transfer-decoded and still content-encoded.

    Read it once, by iteration or by `pipe_to`; then, or instead, `aclose` it. A body that ended
    too early raises `httpx.RemoteProtocolError` (it says after how many bytes), a lost connection
    `httpx.ReadError` or `httpx.WriteError`. What an unfinished request body raises is raised here.
    """

    def __init__(self, connection: "Connection") -> None:
        self._connection: Connection | None = connection
        self._chunks: deque[bytes] = deque()
        self._unread = 0
        self._full = False  # the buffer asks for a pause
        self._held = False  # the reader asks for a pause
        self._error: BaseException | None = None
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None
        self.sender: asyncio.Task[None] | None = None  # sends the request's streamed body
        self.received = 0
        """How many bytes of the body have come; known once the body has ended or is closed."""

    async def __aiter__(self) -> AsyncGenerator[bytes, None]:
        """Yield the body's chunks as they come; unread ones are bounded to about 512 KiB."""
        self._check_unread()
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._unread -= len(chunk)
                if self._full and self._unread <= _LOW_BYTES:
                    self._full = False
                    self._apply_pause()
                yield chunk
            if self._connection is None:
                break
            await self._wait()
        await self._finish()

    async def pipe_to(
        self, sink: Callable[[bytes], None], chunk_sink: ChunkSink | None = None
    ) -> None:
        """Push the rest of the body into `sink` until its end; return then.

        `sink` is called from the socket's read callback, once per read, without a task switch. If
        it raises, the connection is closed and that exception is raised here. Cancelling closes
        the connection. `pause` and `resume` hold upstream back meanwhile. Where the next chunk of a
        chunked body begins, `chunk_sink` is asked first and may take the read as it is.
        """
        self._check_unread()
        try:
            if self._chunks:
                unread = b"".join(self._chunks)
                self._chunks.clear()
                self._unread = 0
                sink(unread)
            if self._connection is not None:
                self._full = False
                self._apply_pause()
                self._connection.sink = sink
                self._connection.chunk_sink = chunk_sink
                await self._wait()
        except BaseException:
            self._abandon()
            await self.settle()
            raise
        await self._finish()

    def pause(self) -> None:
        """Stop reading from upstream's socket, which holds the sender back. Idempotent."""
        self._held = True
        self._apply_pause()

    def resume(self) -> None:
        """Read again. Idempotent."""
        self._held = False
        self._apply_pause()

    async def aclose(self) -> None:
        """Close at once the connection of a body that has not ended. Idempotent.

        Upstream then sees its client leave, and stops generating. Whoever still reads gets
        `httpx.StreamClosed`.
        """
        self._closed = True
        self._chunks.clear()
        self._unread = 0
        self._abandon()
        await self.settle()

    # For the connection and the transport.

    def feed(self, chunk: bytes) -> None:
        """Keep a chunk until it is read."""
        self._chunks.append(chunk)
        self._unread += len(chunk)
        if self._unread > _FULL_BYTES and not self._full:
            self._full = True
            self._apply_pause()
        self._wake()

    def end(self, error: BaseException | None) -> None:
        """Take the body's end: after it the connection is no longer this stream's."""
        self._connection = None
        self._error = error
        sender = self.sender
        if sender is not None and not sender.done() and not _is_running(sender):
            sender.cancel()
        self._wake()

    async def settle(self) -> None:
        """Return when nothing of the request is being sent any more."""
        sender = self.sender
        if sender is not None and not sender.done() and not _is_running(sender):
            await asyncio.wait([sender])  # end() has cancelled it

    def _abandon(self) -> None:
        if self._connection is not None:
            self._connection.fail(httpx.StreamClosed())

    def _check_unread(self) -> None:
        if self._waiter is not None:
            raise RuntimeError("this body is already being read")

    async def _finish(self) -> None:
        await self.settle()
        if self._closed:
            raise httpx.StreamClosed
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _apply_pause(self) -> None:
        if self._connection is not None:
            self._connection.set_reading(not (self._full or self._held))


def _is_running(task: asyncio.Task[None]) -> bool:
    """Whether `task` is the one that asks: a body that fails ends its own sending."""
    return task is asyncio.current_task()
