"""The server that is asked: each request ends, and so does every response that was begun."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import msgspec

from proxy.tools.check.report import CheckError, NotAskedError, printable
from proxy.tools.check.stream_reader import StreamReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

__all__ = ["SHORT_ANSWER_TOKENS", "Patience", "RefusedError", "Server", "open_client"]

SHORT_ANSWER_TOKENS = 16
_RESPONSES = "/v1/responses"
_PROMPT = "Count from 1 to 1000, with a comma between the numbers."
_LONG_ANSWER_TOKENS = 1024
_ANSWER_BYTES = 1024 * 1024
_CONNECT_S = 5.0
_CLEAN_UP_S = 5.0
_EXTRAS = {"ignore_eos": True}
"""vLLM's own member: without it a model may stop before its limit does."""
_BAD_REQUEST = frozenset({400, 422})


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error | str | None = None
    detail: Any = None
    message: str | None = None


class _Created(msgspec.Struct):
    id: str


_refusal = msgspec.json.Decoder(_Refusal)
_created = msgspec.json.Decoder(_Created)


@dataclass(frozen=True)
class Patience:
    """Seconds: for all questions together, and from them how long one thing may be waited for.

    ``answer_s`` is for what a model has to make first, ``ending_s`` for what is to come at once.
    """

    total_s: float

    @property
    def answer_s(self) -> float:
        """How long a head, or the next event of a running stream, may take."""
        return self.total_s / 3

    @property
    def ending_s(self) -> float:
        """After how much silence a stream that ought to have ended counts as left open."""
        return self.total_s / 12


class RefusedError(NotAskedError):
    """The server answered a request with something else than was asked for."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"it answers {status}" + (f": {said}" if said else ""))
        self.status = status
        self.said = said


@dataclass(frozen=True)
class Reply:
    """A whole answer."""

    status: int
    body: bytes

    def refused(self) -> RefusedError:
        """Return the error that says what the server said, in whichever shape it did."""
        try:
            said = _refusal.decode(self.body)
        except (msgspec.MsgspecError, RecursionError):
            return RefusedError(self.status, self.body[:200].decode("utf-8", "replace"))
        error = said.error
        if isinstance(error, _Error):
            return RefusedError(self.status, error.message)
        return RefusedError(self.status, error or said.message or str(said.detail or ""))


def open_client(headers: Mapping[str, str], ca_file: Path | None) -> httpx.AsyncClient:
    """Return a client that follows no redirects and uses no proxies of the environment."""
    try:
        context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
    except (OSError, ssl.SSLError) as error:
        raise CheckError(f"--ca-file: {ca_file} cannot be read: {error}") from error
    return httpx.AsyncClient(
        headers={**headers, "accept-encoding": "identity"},
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
        trust_env=False,
        verify=context,
    )


class Server:
    """One address under check.

    ``model`` and ``long_answer_tokens`` are set once its models are known.  Every background
    response that is begun is remembered, and ended by ``clean_up``.
    """

    def __init__(self, url: str, client: httpx.AsyncClient, patience: Patience) -> None:
        self.url = url
        self.patience = patience
        self.model = ""
        self.long_answer_tokens = _LONG_ANSWER_TOKENS
        self.takes_extras: bool | None = None  # None until a create was accepted
        self._client = client
        self._may_run: dict[str, bool] = {}  # the background responses that were begun

    async def get(self, path: str) -> Reply:
        """GET a whole answer of bounded size."""
        async with self._open("GET", path) as response:
            return await self._reply(response)

    async def cancel(self, response_id: str) -> Reply:
        """Cancel a background response; 200 says that it no longer runs."""
        async with self._open("POST", f"{_place(response_id)}/cancel") as response:
            reply = await self._reply(response)
        if reply.status == httpx.codes.OK:
            self._may_run[response_id] = False
        return reply

    @contextlib.asynccontextmanager
    async def create(self, **members: Any) -> AsyncIterator[StreamReader]:
        """Ask for a stream; ``RefusedError`` says what came instead of one."""
        async with self._create(members | {"stream": True}) as response:
            reader = await self._reader(response)
            try:
                yield reader
            finally:
                if members.get("background") and reader.response_id is not None:
                    running = self._may_run.get(reader.response_id, True)
                    self._may_run[reader.response_id] = running and not reader.terminals

    async def create_unstreamed(self) -> str:
        """Begin a background response without a stream and return its id."""
        async with self._create({"background": True}) as response:
            reply = await self._reply(response)
        if reply.status != httpx.codes.OK:
            raise reply.refused()
        try:
            response_id = _created.decode(reply.body).id
        except msgspec.MsgspecError as error:
            raise NotAskedError("the server answers with no response object") from error
        self._may_run[response_id] = True
        return response_id

    @contextlib.asynccontextmanager
    async def replay(
        self, response_id: str, after: int | None = None
    ) -> AsyncIterator[StreamReader]:
        """Ask for the stream of a response that was begun before."""
        cursor = "" if after is None else f"&starting_after={after}"
        path = f"{_place(response_id)}?stream=true{cursor}"
        async with self._open("GET", path) as response:
            yield await self._reader(response)

    async def clean_up(self) -> int:
        """Cancel what may still run and delete what is kept; return how many are still kept.

        It takes a few seconds at most; a server that fails meanwhile is left alone.
        """
        tasks: list[asyncio.Task[bool]] = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLEAN_UP_S), asyncio.TaskGroup() as group:
                tasks += [group.create_task(self._end(begun)) for begun in self._may_run]
        return sum(task.cancelled() or not task.result() for task in tasks)

    async def _end(self, response_id: str) -> bool:
        """End a background response; tell whether the server has forgotten it."""
        try:
            if self._may_run[response_id]:
                await self.cancel(response_id)
            async with self._open("DELETE", _place(response_id)) as response:
                return response.is_success or response.status_code == httpx.codes.NOT_FOUND
        except NotAskedError:
            return False

    @contextlib.asynccontextmanager
    async def _create(self, members: dict[str, Any]) -> AsyncIterator[httpx.Response]:
        """Send a create request; without vLLM's own members to a server that knows none."""
        plain = {"model": self.model, "input": _PROMPT, "max_output_tokens": SHORT_ANSWER_TOKENS}
        plain |= members
        extras: dict[str, Any] = {} if self.takes_extras is False else dict(_EXTRAS)
        if extras and members.get("background"):
            # An id of our own is known before any answer: it can be cancelled whatever happens.
            extras["request_id"] = f"resp_lastword_check_{secrets.token_hex(8)}"
            self._may_run[extras["request_id"]] = True
        async with self._open("POST", _RESPONSES, plain | extras) as response:
            if response.is_success:
                self.takes_extras = bool(extras)
                yield response
                return
            if response.is_client_error:  # of others nobody knows what was begun behind them
                self._may_run.pop(extras.get("request_id", ""), None)
            refusal = (await self._reply(response)).refused()
        if self.takes_extras is not None or refusal.status not in _BAD_REQUEST:
            raise refusal
        async with self._open("POST", _RESPONSES, plain) as response:
            if not response.is_success:
                raise refusal
            self.takes_extras = False
            yield response

    @contextlib.asynccontextmanager
    async def _open(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Send a request and give its head; failures are sentences."""
        answer_s = self.patience.answer_s
        try:
            request = self._client.build_request(method, self.url + path, json=body)
            async with asyncio.timeout(answer_s):
                response = await self._client.send(request, stream=True)
        except TimeoutError as error:
            raise NotAskedError(f"no answer within {answer_s:.3g} s (--timeout-s)") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise NotAskedError(f"the connection failed: {_reason(error)}") from error
        try:
            yield response
        finally:
            await response.aclose()

    async def _reply(self, response: httpx.Response) -> Reply:
        body = b""
        try:
            async with asyncio.timeout(self.patience.answer_s):
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > _ANSWER_BYTES:
                        raise NotAskedError(f"the answer is longer than {_ANSWER_BYTES >> 20} MiB")
        except TimeoutError as error:
            raise NotAskedError("the answer did not end in time (--timeout-s)") from error
        except httpx.TransportError as error:
            raise NotAskedError(f"the answer broke off: {_reason(error)}") from error
        return Reply(response.status_code, body)

    async def _reader(self, response: httpx.Response) -> StreamReader:
        if not response.is_success:
            raise (await self._reply(response)).refused()
        kind = response.headers.get("content-type", "")
        coding = response.headers.get("content-encoding", "identity")
        if kind.partition(";")[0].strip().lower() != "text/event-stream":
            raise RefusedError(response.status_code, f"no event stream but {kind or 'no type'}")
        if coding.lower() != "identity":
            raise RefusedError(response.status_code, f"an event stream in {coding}")
        return StreamReader(response.aiter_raw())


def _place(response_id: str) -> str:
    """Return a response's path, whatever a server calls it."""
    return f"{_RESPONSES}/{quote(response_id, safe='')}"


def _reason(error: Exception) -> str:
    return printable(str(error)) or type(error).__name__
