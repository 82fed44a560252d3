"""The bytes of vLLM's event streams, as 0.32 writes them: each event is one HTTP chunk.

Each stream is made of a lead, deltas and a tail.  A Responses stream ends as vLLM ends one when the
tokens run out: a `response.completed` whose status is `incomplete`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 29 Nov 2026 15:16:40 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
RESPONSE_EVENTS_AROUND: Final = 8
"""How many events a Responses stream has beside its deltas."""
CHAT_EVENTS_AROUND: Final = 3
"""How many a chat stream has beside its deltas, `[DONE]` among them."""

_END: Final = b"0\r\n\r\n"
_RESPONSE: Final = (
    '{"response":{"id":"resp_%(n)016x","created_at":1795965400,"incomplete_details":%(details)s,'
    '"instructions":null,"metadata":null,"model":"bench","object":"response","output":%(output)s,'
    '"parallel_tool_calls":true,"temperature":0.0,"tool_choice":"none","tools":[],"top_p":1.0,'
    '"background":false,"max_output_tokens":%(tokens)d,"max_tool_calls":null,'
    '"previous_response_id":null,"prompt":null,"reasoning":null,"service_tier":"auto",'
    '"status":"%(status)s","text":null,"top_logprobs":null,"truncation":"disabled",'
    '"usage":null,"user":null,"presence_penalty":0.0,"frequency_penalty":0.0,'
    '"kv_transfer_params":null,"ec_transfer_params":null,"input_messages":null,'
    '"output_messages":null},"sequence_number":%(number)d,"type":"%(type)s"}'
)
_ITEM: Final = (
    '{"id":"msg_%(n)016x","content":[%(content)s],"role":"assistant","status":"%(status)s",'
    '"type":"message","phase":null}'
)
_PART: Final = '{"annotations":[],"text":"%s","type":"output_text","logprobs":%s}'
_LOGPROB: Final = (
    '{"token":" whale","bytes":[32,119,104,97,108,101],"logprob":-0.6931471805599453,'
    '"top_logprobs":[{"token":" whale","bytes":[32,119,104,97,108,101],'
    '"logprob":-0.6931471805599453}]}'
)
_LOGPROBS_AT_ONCE: Final = 1000
_LOGPROBS: Final = f",{_LOGPROB}".encode() * _LOGPROBS_AT_ONCE
_CHAT: Final = (
    b'{"id":"chatcmpl-%016x","object":"chat.completion.chunk","created":1795965400,'
    b'"model":"bench","choices":[{"index":0,"delta":{%b},"logprobs":null,"finish_reason":%b}]}'
)


class Events(Protocol):
    """One stream's events, framed for the wire."""

    def lead(self) -> bytes:
        """Return what comes before the first token."""

    def delta(self, index: int, text: bytes) -> bytes:
        """Return one token's event, the first with index 0."""

    def tail(self, texts: Sequence[bytes]) -> Iterator[bytes]:
        """Return what follows all tokens, in pieces to be written one after the other."""


class ResponseEvents:
    """`POST /v1/responses` with ``stream``.

    ``logprobs_bytes`` makes the last event at least so large, by logprobs in its ``output``.
    """

    def __init__(self, number: int, tokens: int, logprobs_bytes: int = 0) -> None:
        self._number = number
        self._tokens = tokens
        self._logprobs_bytes = logprobs_bytes
        # Only the text and the number change from one delta to the next.
        self._before = b'event: response.output_text.delta\ndata: {"content_index":0,"delta":"'
        self._after = b'","item_id":"msg_%016x","logprobs":[],"output_index":0,' % number

    def lead(self) -> bytes:
        """Return created, in_progress, and the item and part that the text goes into."""
        item = _ITEM % {"n": self._number, "content": "", "status": "in_progress"}
        part = _PART % ("", "null")
        return (
            self._state(0, "response.created", "in_progress")
            + self._state(1, "response.in_progress", "in_progress")
            + _response_chunk("response.output_item.added", f'"item":{item},"output_index":0', 2)
            + _response_chunk("response.content_part.added", f'{self._place},"part":{part}', 3)
        )

    def delta(self, index: int, text: bytes) -> bytes:
        """Return a `response.output_text.delta`."""
        block = b'%b%b%b"sequence_number":%d,"type":"response.output_text.delta"}\n\n' % (
            self._before,
            text,
            self._after,
            index + 4,
        )
        return b"%x\r\n%b\r\n" % (len(block), block)

    def tail(self, texts: Sequence[bytes]) -> Iterator[bytes]:
        """Return the ends of part and item, and the last event with the whole text."""
        text = b"".join(texts).decode()
        number = self._tokens + 4
        part = _PART % (text, "null")
        item = _ITEM % {"n": self._number, "content": part, "status": "completed"}
        before = (
            _response_chunk(
                "response.output_text.done", f'{self._place},"logprobs":[],"text":"{text}"', number
            )
            + _response_chunk(
                "response.content_part.done", f'{self._place},"part":{part}', number + 1
            )
            + _response_chunk(
                "response.output_item.done", f'"item":{item},"output_index":0', number + 2
            )
        )
        if not self._logprobs_bytes:
            last = self._state(number + 3, "response.completed", "incomplete", f"[{item}]")
            yield before + last + _END
            return
        repeats = -(-self._logprobs_bytes // len(_LOGPROBS))
        part = _PART % (text, f"[{_LOGPROB}\0]")
        item = _ITEM % {"n": self._number, "content": part, "status": "completed"}
        payload = self._payload(number + 3, "response.completed", "incomplete", f"[{item}]")
        start, end = _block("response.completed", payload).split(b"\0")
        size = len(start) + repeats * len(_LOGPROBS) + len(end)
        yield before + b"%x\r\n%b" % (size, start)
        for _ in range(repeats):
            yield _LOGPROBS
        yield end + b"\r\n" + _END

    @property
    def _place(self) -> str:
        return f'"content_index":0,"item_id":"msg_{self._number:016x}","output_index":0'

    def _state(self, number: int, kind: str, status: str, output: str = "[]") -> bytes:
        return _chunk(_block(kind, self._payload(number, kind, status, output)))

    def _payload(self, number: int, kind: str, status: str, output: str) -> str:
        return _RESPONSE % {
            "n": self._number,
            "details": '{"reason":"max_output_tokens"}' if status == "incomplete" else "null",
            "output": output,
            "tokens": self._tokens,
            "status": status,
            "number": number,
            "type": kind,
        }


class ChatEvents:
    """`POST /v1/chat/completions` with ``stream``."""

    def __init__(self, number: int) -> None:
        self._number = number

    def lead(self) -> bytes:
        """Return the chunk with the role."""
        return self._chunk(b'"role":"assistant","content":""')

    def delta(self, index: int, text: bytes) -> bytes:
        """Return a chunk with content."""
        return self._chunk(b'"content":"%b"' % text)

    def tail(self, texts: Sequence[bytes]) -> Iterator[bytes]:
        """Return the chunk with the finish reason, and `[DONE]`."""
        yield self._chunk(b"", b'"length"') + _chunk(b"data: [DONE]\n\n") + _END

    def _chunk(self, delta: bytes, finish_reason: bytes = b"null") -> bytes:
        return _chunk(b"data: %b\n\n" % (_CHAT % (self._number, delta, finish_reason)))


def _response_chunk(kind: str, members: str, number: int) -> bytes:
    return _chunk(_block(kind, f'{{{members},"sequence_number":{number},"type":"{kind}"}}'))


def _block(kind: str, payload: str) -> bytes:
    return f"event: {kind}\ndata: {payload}\n\n".encode()


def _chunk(block: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(block), block)
