"""Make one run go: ask upstream, take its stream, take it up again, end it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import httpx
import structlog

from proxy.background.answer import Answer, is_event_stream, read_answer
from proxy.background.feed import State
from proxy.background.lease_look import LeaseLook
from proxy.background.run import Run, RunMode
from proxy.background.stall import Finding, StallCheck
from proxy.background.vllm_responses import VllmResponses, without_body
from proxy.core.content_coding import DECODABLE, PIECE_BYTES, InflateError, Inflater
from proxy.core.outcome import Outcome
from proxy.errors import RequestError, UpstreamError
from proxy.upstream.client import lost_message
from proxy.upstream.headers import values
from proxy.upstream.silence import SilenceLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.store.shared import SharedStore
    from proxy.upstream.body import ChunkSink
    from proxy.upstream.client import UpstreamClient, UpstreamResponse
    from proxy.upstream.headers import Pairs

__all__ = ["Maker", "MakerLimits"]

log = structlog.stdlib.get_logger("lastword")

END_WAIT_S = 0.2
RETRY_PAUSE_S = 1.0
_NAMELESS_BYTES = 16 * 1024 * 1024  # of a stream that does not say what it is about
_REFUSED = frozenset({401, 403})


@dataclass(frozen=True)
class MakerLimits:
    """Seconds: silence that ends a run, silence after which vLLM is asked, time it may be down."""

    idle_s: float
    stall_check_s: float
    down_s: float


class Maker:
    """Drive one run from upstream's first byte to its end.

    ``started`` tells whether a stream has begun: the head's headers if it has, otherwise what
    upstream answered; it raises ``UpstreamError`` if upstream cannot be asked.
    """

    def __init__(
        self,
        run: Run,
        client: UpstreamClient,
        *,
        path: bytes,
        headers: Pairs,
        limits: MakerLimits,
        shared: SharedStore | None = None,
    ) -> None:
        self.run = run
        self.started: asyncio.Future[Pairs | Answer] = asyncio.get_running_loop().create_future()
        self._client = client
        self._path = path
        self._headers = headers
        self._limits = limits
        self._time = asyncio.get_running_loop().time
        self._response: UpstreamResponse | None = None
        self._asking: asyncio.Timeout | None = None  # while the stream is asked for again
        self._end_timer: asyncio.TimerHandle | None = None
        self._stopping: State | None = None
        self._reason = ""
        self._read_again = False
        self._shared = shared

    @property
    def retrieve_headers(self) -> Pairs:
        """The headers of the create request that also suit a GET."""
        return without_body(self._headers)

    @property
    def refused(self) -> bool:
        """Whether upstream has answered with something else than a stream."""
        started = self.started
        if not started.done() or started.cancelled():
            return False
        return started.exception() is not None or isinstance(started.result(), Answer)

    def give_up(self) -> None:
        """Let nobody wait for what will not come any more; harmless after an ordinary end."""
        if not self.started.done():
            self.started.set_exception(UpstreamError(502, "The request was not answered."))
        if not self.run.created.done():
            self.run.created.set_result(None)
        self.started.exception()  # nobody may be there to hear it

    async def create(self, target: bytes, body: bytes) -> None:
        """Send the create request and make the run from its answer."""
        try:
            async with asyncio.timeout(None) as self._asking:
                response = await self._client.open("POST", target, self._headers, body)
        except RequestError as failure:
            self.started.set_exception(failure)
            return
        except TimeoutError:  # `stop` does not wait for upstream's head
            self.started.set_exception(UpstreamError(503, self._reason))
            return
        finally:
            self._asking = None
            del body  # nobody needs it while the run goes on
        try:
            if not is_event_stream(response):
                self.started.set_result(await read_answer(response))
                return
            self.started.set_result(
                [pair for pair in response.headers.raw if pair[0].lower() != b"content-encoding"]
            )
            error = await self._take_stream(response)
        except UpstreamError as failure:
            self.started.set_exception(failure)
            return
        finally:
            await response.stream.aclose()
        await self._go_on(error)

    async def resume(self) -> bool:
        """Make a run that someone else began, from upstream's own replay.

        False, and the run left open, if upstream wants credentials that are not there.
        """
        return await self._go_on(None, again=True)

    async def stop(self, state: State, reason: str = "") -> None:
        """End the run early: cancelled by now, or failed for ``reason``, or left to upstream."""
        self._stopping = state
        self._reason = reason
        if self._asking is not None:
            self._asking.reschedule(asyncio.get_running_loop().time())
        if self._response is not None:
            await self._response.stream.aclose()

    async def abandon(self, reason: str) -> None:
        """End a run that nobody will follow, also where vLLM would make it go on by itself."""
        await self.stop(State.ENDED, reason)
        if self.run.mode is RunMode.UPSTREAM and self.run.key is not None:
            target = b"%b/%b/cancel" % (self._path, self.run.key.response_id.encode())
            try:
                await VllmResponses(self._client).cancel(target, self._headers)
            except RequestError as error:
                log.warning("a run that cannot be kept goes on at vLLM", error=str(error))

    async def _go_on(self, error: Exception | None, *, again: bool = False) -> bool:
        """End the run if its stream has ended; take it up again where vLLM may still have it."""
        run = self.run
        if run.mode is RunMode.UPSTREAM and run.key is not None:
            loop = asyncio.get_running_loop()
            give_up_at = loop.time() + self._limits.down_s
            # Silence has its limit; asking again would only begin another.
            while not (run.corrector.ended or self._stopping or isinstance(error, TimeoutError)):
                number = run.last_number
                try:
                    async with asyncio.timeout(None) as self._asking:
                        await asyncio.sleep(0 if again else RETRY_PAUSE_S)
                        again = False
                        response = await self._client.open(
                            "GET", self._replay_target(), self.retrieve_headers, b""
                        )
                except (UpstreamError, TimeoutError) as failure:
                    self._asking = None
                    error = failure
                else:
                    self._asking = None
                    try:
                        if response.status_code in _REFUSED:
                            return False
                        if not is_event_stream(response):
                            error = UpstreamError(404, "The upstream server has it no longer.")
                            break
                        error = await self._take_stream(response)
                    finally:
                        await response.stream.aclose()
                if run.last_number > number:
                    give_up_at = loop.time() + self._limits.down_s
                if loop.time() >= give_up_at:
                    break
        await self._close(error)
        return True

    async def _close(self, error: Exception | None) -> None:
        run = self.run
        state = State.ENDED
        if not run.corrector.ended:
            if self._stopping is State.ELSEWHERE and run.mode is RunMode.UPSTREAM:
                state = State.ELSEWHERE
            else:
                ended_as = Outcome.LOST if self._stopping is None else Outcome.STOPPED
                run.fail(self._reason or lost_message(error), ended_as)
        if not run.created.done():
            run.created.set_result(None)
        await run.close(state)

    async def _take_stream(self, response: UpstreamResponse) -> Exception | None:
        """Take an event stream to its end; return what broke it, if anything did."""
        run = self.run
        if self._stopping is not None:
            return None
        self._response = response
        silence = SilenceLimit(self._limits.idle_s)
        take: Callable[[bytes], None] = partial(self._take, silence)
        now, take_http_chunk = self._time, run.take_http_chunk

        def take_chunk(http_chunk: bytes) -> int:
            silence.heard_at = at = now()
            return take_http_chunk(http_chunk, at)

        look = self._shared and LeaseLook(self._shared, run, response.stream, take, take_chunk)
        watch = asyncio.create_task(self._watch(silence, response))  # noqa: TID251 - ended below
        try:
            async with silence:
                sinks = (look.take, look.take_http_chunk) if look else (take, take_chunk)
                await self._pipe(response, *sinks)
        except (httpx.TransportError, TimeoutError, httpx.StreamError, InflateError) as error:
            return error
        else:
            return None
        finally:
            if look:
                await look.settled()
            run.finish()  # half an event must not run into what comes next
            self._response = None
            if self._end_timer is not None:
                self._end_timer.cancel()
                self._end_timer = None
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _pipe(
        self, response: UpstreamResponse, take: Callable[[bytes], None], take_chunk: ChunkSink
    ) -> None:
        """Hand the body to ``take`` as it comes, decoded where it came compressed all the same."""
        coding = b",".join(values(response.headers.raw, b"content-encoding")).strip().lower()
        if coding not in DECODABLE:
            await response.stream.pipe_to(take, take_chunk)
            return
        inflater = Inflater(coding)
        async for chunk in response.stream:
            for piece in inflater.feed(chunk):
                take(piece)
                if len(piece) == PIECE_BYTES:
                    await asyncio.sleep(0)
                if not self.run.corrector.between_events:
                    inflater.refuse_bomb()

    def _take(self, silence: SilenceLimit, chunk: bytes) -> None:
        """Take one chunk from upstream's socket."""
        silence.heard_at = self._time()
        run = self.run
        run.take(chunk)
        if run.key is None and run.nameless_bytes > _NAMELESS_BYTES:
            silence.end_after(0)
        if run.corrector.terminal is not None and self._end_timer is None:
            loop = asyncio.get_running_loop()
            self._end_timer = loop.call_later(END_WAIT_S, silence.end_after, 0)

    async def _watch(self, silence: SilenceLimit, response: UpstreamResponse) -> None:
        """Ask vLLM about a run that has fallen silent, and end it if it will not speak again."""
        run, pause_s = self.run, self._limits.stall_check_s
        if run.mode is not RunMode.UPSTREAM or not pause_s:
            return
        await asyncio.shield(run.created)  # others wait for it too
        if run.key is None:
            return
        target = b"%b/%b" % (self._path, run.key.response_id.encode())
        check = StallCheck(self._client, target, self.retrieve_headers, down_s=self._limits.down_s)
        while not run.corrector.ended:
            if silence.silent_s >= pause_s:
                finding = await check.ask()
                if silence.silent_s >= pause_s and self._act_on(finding):
                    await response.stream.aclose()
                    return
            await asyncio.sleep(min(pause_s, max(0.05, self._limits.down_s / 4)))

    def _act_on(self, finding: Finding) -> bool:
        """End the run as vLLM's word asks; True if its silent stream is of no more use."""
        match finding:
            case Finding.RUNNING:
                return False
            case Finding.CANCELLED:
                self.run.cancel()
            case Finding.FINISHED if not self._read_again:
                self._read_again = True  # once: its events must be there to be read
            case Finding.DOWN:
                self.run.fail("The upstream server is down; the response cannot be finished.")
            case Finding.GONE:
                self.run.fail("The upstream server has the response no longer.")
            case _:
                self.run.fail("The upstream server gave the response up without an event.")
        return True

    def _replay_target(self) -> bytes:
        key = self.run.key
        if key is None:
            raise RuntimeError("a run is taken up again once it has an id")
        target = b"%b/%b?stream=true" % (self._path, key.response_id.encode())
        number = self.run.last_number
        return target if number < 0 else target + b"&starting_after=%d" % number
