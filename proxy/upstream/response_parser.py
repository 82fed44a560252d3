"""A response from bytes: llhttp (httptools) in its strict mode, and what it leaves to its users.

That is the end of a body at EOF, HEAD, limits, and a response framed in two ways or in none that
we can decode. Nothing here knows a socket.
"""

import httptools
import httpx


class ResponseParser:
    """Reads one response, and the 1xx before it, from bytes.

    `feed` returns body bytes. When `news` is true after it, the head or the end has come, or
    `error` says why the rest cannot be read. `keep_alive` counts once `complete` is true, and
    `body_bytes` how much of the body has come. While `in_chunk[0]` is false, the next byte begins
    a chunk: one that is whole need not be fed, if its data are added to `body_bytes`.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_head_bytes",
        "_head_only",
        "_length",
        "_max_head_bytes",
        "_overhead",
        "_parser",
        "_pieces",
        "_until_close",
        "body_bytes",
        "complete",
        "error",
        "head_complete",
        "headers",
        "http_version",
        "in_chunk",
        "keep_alive",
        "news",
        "on_body",
        "on_chunk_complete",
        "on_chunk_header",
        "reason",
        "status",
    )

    def __init__(self, *, head_only: bool, max_head_bytes: int) -> None:
        self.status = 0
        self.reason = b""
        self.http_version = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.head_complete = False
        self.complete = False
        self.keep_alive = False
        self.news = False
        self.error: httpx.RemoteProtocolError | None = None
        self._head_only = head_only
        self._max_head_bytes = max_head_bytes
        self._head_bytes = 0  # of all heads, so that endless 1xx have an end
        self._overhead = 0  # bytes of reads that brought no body since the last that did
        self.body_bytes = 0
        self._length: int | None = None
        self._chunked = False
        self._until_close = False
        self._pieces: list[bytes] = []
        # llhttp calls the list's own method: no Python frame per HTTP chunk.
        self.on_body = self._on_surplus if head_only else self._pieces.append
        # Turned by each chunk's beginning and its end, if there are chunks.
        self.in_chunk = [True, True]
        self.on_chunk_header = self.on_chunk_complete = self.in_chunk.reverse
        self._parser = httptools.HttpResponseParser(self)

    @property
    def started(self) -> bool:
        """Whether any byte of an answer has come."""
        return self.head_complete or self._overhead > 0

    def feed(self, data: bytes) -> bytes:
        """Take bytes from the connection and return the body bytes among them."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._on_parser_error(exc)
        pieces = self._pieces
        if not pieces:
            self._overhead += len(data)
            if self._overhead > self._max_head_bytes and not self.complete:
                self._refuse(self._too_large())
            return b""
        self._overhead = 0
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self.body_bytes += len(body)
        return body

    def feed_eof(self) -> None:
        """Take the end of the connection: the end of the body, or an error."""
        if self.complete or self.error is not None:
            return
        if self._until_close and self.head_complete:
            self.complete = self.news = True
        elif not self.started:
            self._refuse("upstream closed the connection without an answer")
        elif not self.head_complete:
            self._refuse("upstream closed the connection inside the response head")
        elif self._length is not None:
            self._refuse(
                f"upstream: connection closed after {self.body_bytes} of {self._length} bytes"
            )
        else:
            self._refuse("upstream: connection closed before the last chunk")

    def release(self) -> None:
        """Let go of llhttp's object, which refers back to this one; nothing can be fed after."""
        del self._parser

    # Called by httptools, by these names.

    def on_message_begin(self) -> None:
        """Refuse a second response: nobody asked for one."""
        if self.complete:
            self._on_surplus(b"")

    def on_status(self, reason: bytes) -> None:
        """Collect the reason phrase, which may come in parts."""
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep one header line; trailers are dropped."""
        if self.head_complete:
            return
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > self._max_head_bytes:
            raise httpx.RemoteProtocolError(self._too_large())
        self.headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Judge the head: its version, its status, and where its body ends."""
        parser = self._parser
        version = parser.get_http_version()
        self.status = parser.get_status_code()
        if version not in ("1.0", "1.1") or self.status < 100:  # noqa: PLR2004 - RFC 9110, 15
            raise httpx.RemoteProtocolError("upstream's answer is not HTTP/1.1")
        if self.status == 101:  # noqa: PLR2004
            raise httpx.RemoteProtocolError("upstream switched protocols (101) without being asked")
        if self.status < 200:  # noqa: PLR2004 - interim; on_message_complete drops it
            return
        self.http_version = b"HTTP/" + version.encode()
        self._judge_framing(http_1_0=version == "1.0")
        self.head_complete = self.news = True
        if self._head_only:
            self.complete = True

    def on_message_complete(self) -> None:
        """Note the end of the response, or forget an interim one."""
        if self.head_complete:
            self.complete = self.news = True
        else:
            self.status = 0
            self.reason = b""
            self.headers.clear()

    def _judge_framing(self, *, http_1_0: bool) -> None:
        codings: list[bytes] = []
        options: set[bytes] = set()
        for name, value in self.headers:
            match name.lower():
                case b"content-length":
                    self._length = int(value)  # llhttp let one number pass, no other form
                case b"transfer-encoding":
                    codings.append(value.lower())
                case b"connection":
                    options.update(option.strip().lower() for option in value.split(b","))
        bodiless = self._head_only or self.status in (204, 304)
        if not bodiless and codings not in ([], [b"chunked"]):
            raise httpx.RemoteProtocolError("upstream's answer has a transfer coding but chunked")
        self._chunked = bool(codings)
        if self._chunked:
            self.in_chunk[0] = False
        self._until_close = not (bodiless or codings or self._length is not None)
        asked_to_keep = b"keep-alive" in options if http_1_0 else True
        self.keep_alive = asked_to_keep and b"close" not in options and not self._until_close

    def _on_surplus(self, _: bytes) -> None:
        raise httpx.RemoteProtocolError("upstream sent bytes after the end of its answer")

    def _on_parser_error(self, exc: httptools.HttpParserError) -> None:
        if self.complete:
            self.keep_alive = False  # the answer itself is whole
            return
        # What a callback above raised says more than llhttp's "callback error".
        known = exc.__context__
        self._refuse(
            str(known)
            if isinstance(known, httpx.RemoteProtocolError)
            else f"upstream's answer is not valid HTTP/1.1: {exc}"
        )

    def _too_large(self) -> str:
        part = "chunk framing" if self.head_complete else "response head"
        return f"upstream's {part} is larger than {self._max_head_bytes} bytes"

    def _refuse(self, message: str) -> None:
        if self.error is None:
            self.error = httpx.RemoteProtocolError(message)
        self.news = True
