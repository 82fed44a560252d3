"""What the fuzzer begins with: one or two inputs of every kind, and the words of the grammar."""

from __future__ import annotations

from tests.fuzz.targets import seed

_DELTA = b'event: d\ndata: {"type":"response.output_text.delta","sequence_number":1}\n\n'
_END = (
    b"event: response.completed\ndata: "
    b'{"response":{"id":"r","status":"incomplete"},"sequence_number":2,"type":"response.completed"}'
)
_CREATED = b'data: {"type":"response.created","response":{"id":"r","status":"in_progress"}}\n\n'
_OBJECT = rb'{ "a" : [1, {"b":"}"}], "\u0061":"\ud800", "type":"x" ,"n":-1.5e3}'

SEEDS = [
    seed(
        "event_stream", b"\xef\xbb\xbfid: 1\r\nretry: 5\r\n\r\ndata\n\ndata: a\rdata:b\r\r", b"\x50"
    ),
    seed("event_stream", _CREATED + b": comment\n\n" + _DELTA, b"\x20\xa0"),
    seed("corrector", _CREATED + _DELTA + _END + b"\n\ndata: [DONE]\n\n", b"\x80"),
    seed("corrector", _CREATED + _END.replace(b"\n", b"\r\n"), b"\x40\xc0"),
    seed("corrector", _CREATED + b'event: error\ndata: {"error":{"message":"m"}}\n\n'),
    seed(
        "corrector", _END.replace(b"{", b"{\ndata:").replace(b"pleted", rb"plet\u0065d") + b"\n\n"
    ),
    seed("json_edit", _OBJECT),
    seed("json_edit", b'{"a":1,"a":{"a":[]},"b":null}'),
    seed("inflated", _DELTA * 3, b"\x55\xaa"),
]

WORDS = [
    *(b"event: ", b"data: ", b"data:", b"id: ", b"retry: ", b":", b"\n\n", b"\r\n\r\n", b"\r\r"),
    *(b"response.completed", b"response.incomplete", b"response.failed", b"[DONE]", b"error"),
    *(b'"type":', b'"response":{', b'"status":', b'"incomplete"', b'"completed"', b'"cancelled"'),
    *(b'"sequence_number":', b"\\u0065", b"\\ud800", b"\\udc00", b"\xe2\x80\xa8", b"\xef\xbb\xbf"),
    *(b"null", b"true", b"1e400", b"-0", b"{}", b"[]", b'"', b"\\"),
]
