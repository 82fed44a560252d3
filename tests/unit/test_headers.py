"""Which headers cross."""

from __future__ import annotations

import ipaddress

import pytest

from proxy.errors import BadRequestError
from proxy.upstream.headers import Forwarding, Pairs, response_headers

REQUEST: Pairs = [
    (b"host", b"api.example"),
    (b"authorization", b"Bearer k"),
    (b"x-a", b"1"),
    (b"x-a", b"\xe4"),
    (b"connection", b"keep-alive, X-Hop"),
    (b"x-hop", b"secret"),
    (b"te", b"trailers"),
    (b"proxy-authorization", b"secret"),
    (b"accept-encoding", b"gzip"),
    (b"content-length", b"5"),
]


def up(headers: Pairs, forwarding: Forwarding | None = None, **options: object) -> Pairs:
    """The headers that go up."""
    given = {
        "peer": "192.0.2.7",
        "scheme": "http",
        "http_version": "1.1",
        "request_id": b"new",
        "identity": False,
    }
    return (forwarding or Forwarding(pseudonym=b"me")).request_headers(
        headers,
        **given | options,  # type: ignore[arg-type]  # the tests' own keywords
    )


def test_what_a_client_sent_goes_up() -> None:
    """End-to-end headers keep order and bytes, hop-by-hop ones go, nothing is invented."""
    assert up(REQUEST) == [
        (b"host", b"api.example"),
        (b"authorization", b"Bearer k"),
        (b"x-a", b"1"),
        (b"x-a", b"\xe4"),
        (b"accept-encoding", b"gzip"),
        (b"content-length", b"5"),
        (b"via", b"1.1 me"),
        (b"x-request-id", b"new"),
        (b"x-forwarded-for", b"192.0.2.7"),
        (b"x-forwarded-proto", b"http"),
        (b"x-forwarded-host", b"api.example"),
    ]


def test_via_says_what_was_received() -> None:
    """The version is that of the message that came, not of the one that goes (RFC 9110, 7.6.3)."""
    before = (b"via", b"2 edge")
    assert (b"via", b"2 edge, 1.0 me") in up([*REQUEST, before], http_version="1.0")


def test_identity_is_asked_for_on_the_two_routes() -> None:
    """A stream that is to be read is asked for without compression."""
    found = [value for name, value in up(REQUEST, identity=True) if name == b"accept-encoding"]
    assert found == [b"identity"]


def test_chunked_framing_is_rebuilt() -> None:
    """A chunked body goes up chunked, whatever length was claimed beside it."""
    out = up([*REQUEST, (b"transfer-encoding", b"chunked")])
    assert (b"transfer-encoding", b"chunked") in out
    assert not [name for name, _ in out if name == b"content-length"]


def test_connection_cannot_name_the_framing_or_the_host() -> None:
    """What Connection names goes, but for what the message cannot do without."""
    out = up([(b"host", b"h"), (b"connection", b"host, content-length"), (b"content-length", b"0")])
    assert {b"host", b"content-length"} <= {name for name, _ in out}


def test_host_of_the_upstream() -> None:
    """The upstream's own name can be sent instead of the client's."""
    out = up(REQUEST, Forwarding(origin_host=b"vllm:8000", pseudonym=b"me"))
    assert (b"host", b"vllm:8000") in out
    assert (b"x-forwarded-host", b"api.example") in out


FORWARDED: Pairs = [
    (b"host", b"inner"),
    (b"x-forwarded-for", b"203.0.113.9"),
    (b"x-forwarded-for", b"198.51.100.1"),
    (b"x-forwarded-proto", b"https"),
    (b"x-forwarded-host", b"outer"),
]


@pytest.mark.parametrize(
    ("networks", "peer", "told"),
    [
        (
            "192.0.2.0/24",
            "192.0.2.7",
            [b"203.0.113.9, 198.51.100.1, 192.0.2.7", b"https", b"outer"],
        ),
        ("10.0.0.0/8", "192.0.2.7", [b"192.0.2.7", b"http", b"inner"]),
        (None, "192.0.2.7", [b"192.0.2.7", b"http", b"inner"]),
        ("192.0.2.0/24", "not an address", [b"not an address", b"http", b"inner"]),
        ("192.0.2.0/24", None, [b"http", b"inner"]),
    ],
)
def test_forwarded_headers(networks: str | None, peer: str | None, told: list[bytes]) -> None:
    """A trusted proxy's word is appended to; anyone else's is replaced."""
    trusted = [ipaddress.ip_network(networks)] if networks else []
    out = up(FORWARDED, Forwarding(trusted_networks=trusted, pseudonym=b"me"), peer=peer)
    assert [value for name, value in out if name.startswith(b"x-forwarded-")] == told


def test_via_is_appended_and_a_loop_is_refused() -> None:
    """Other proxies in Via are kept; our own pseudonym there means a loop."""
    assert (b"via", b"1.0 a, 1.1 b, 1.1 me") in up([(b"via", b"1.0 a"), (b"via", b"1.1 b")])
    with pytest.raises(BadRequestError) as caught:
        up([(b"via", b"1.1 a, 1.1 me")])
    assert caught.value.status == 508
    assert Forwarding().pseudonym != Forwarding().pseudonym


def test_a_request_id_is_kept() -> None:
    """A client's X-Request-Id goes up as it came."""
    out = up([(b"x-request-id", b"mine")])
    assert [value for name, value in out if name == b"x-request-id"] == [b"mine"]


RESPONSE: Pairs = [
    (b"date", b"today"),
    (b"server", b"uvicorn"),
    (b"content-type", b"text/event-stream"),
    (b"Transfer-Encoding", b"chunked"),
    (b"set-cookie", b"a=1"),
    (b"set-cookie", b"b=2"),
    (b"connection", b"x-hop"),
    (b"x-hop", b"1"),
]


def down(headers: Pairs, *, stream: bool = False, rewritten: bool = False) -> Pairs:
    """The headers that go down."""
    return response_headers(
        headers, request_id=b"id", event_stream=stream, rewritten=rewritten, decoded=rewritten
    )


def test_what_upstream_sent_goes_down() -> None:
    """Repeated headers stay apart, hop-by-hop ones go, the request id is added."""
    assert down(RESPONSE) == [*RESPONSE[:3], *RESPONSE[4:6], (b"x-request-id", b"id")]


def test_event_streams_tell_gateways_not_to_buffer() -> None:
    """X-Accel-Buffering and Cache-Control are added only where absent."""
    added = [(b"x-accel-buffering", b"no"), (b"cache-control", b"no-cache")]
    assert down(RESPONSE, stream=True)[-2:] == added
    theirs = [
        (b"Cache-Control", b"private"),
        (b"X-Accel-Buffering", b"yes"),
        (b"x-request-id", b"r"),
    ]
    assert down(theirs, stream=True) == theirs


def test_a_rewritten_body_has_no_length_of_the_old_one() -> None:
    """A length or coding that is no longer true does not go down."""
    old: Pairs = [(b"Content-Length", b"9"), (b"content-encoding", b"gzip")]
    assert down(old, rewritten=True) == [(b"x-request-id", b"id")]
    assert down(old)[:2] == old
