"""Background responses over HTTP: created, followed, replayed, cancelled, deleted."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from proxy.background.answer import Answer
from proxy.background.meta import RESPONSE_ID, is_object, not_found
from proxy.background.remote import RemoteRun
from proxy.background.run import Run, RunMode
from proxy.background.vllm_responses import VllmResponses
from proxy.core.background import as_queued, read_create, to_foreground
from proxy.core.responses import read_payload
from proxy.errors import BadRequestError
from proxy.gateway.background_answers import (
    ENDED,
    FROM_THE_START,
    StreamAnswers,
    cannot_cancel,
    no_stream,
    read_query,
    status_of,
    why_no_events,
)
from proxy.gateway.record import brief
from proxy.settings import Background
from proxy.store import CopyInfo, Gone, Tombstone
from proxy.upstream.headers import response_headers

if TYPE_CHECKING:
    from proxy.background.owner import Owners
    from proxy.background.runs import Begun, Runs
    from proxy.core.background import CreateRequest
    from proxy.gateway.downstream import Downstream
    from proxy.gateway.record import Observer
    from proxy.settings import Settings
    from proxy.upstream.client import UpstreamClient
    from proxy.upstream.headers import Pairs

__all__ = ["BackgroundRoutes"]

# How long auto believes that vLLM's store is off before it asks again.
_PROXY_FOR_S = 60.0
_STORE_OFF = "VLLM_ENABLE_RESPONSES_API_STORE"
_BAD_REQUEST = 400
_NOT_FOUND = 404
_OK = 200

_Found = Run | RemoteRun | CopyInfo | Tombstone


class BackgroundRoutes:
    """The routes of responses whose copies are kept here; each says whether it has answered.

    They raise ``StoreError`` where the store does not answer.
    """

    def __init__(
        self,
        settings: Settings,
        client: UpstreamClient,
        runs: Runs,
        owners: Owners,
        observer: Observer,
    ) -> None:
        self._settings = settings
        self._vllm = VllmResponses(client)
        self._runs = runs
        self._owners = owners
        self._streams = StreamAnswers(settings, runs, observer)
        self._proxy_until = 0.0

    @property
    def followers(self) -> int:
        """How many clients are being sent a copy's events."""
        return self._streams.followers

    async def create(self, down: Downstream, headers: Pairs) -> bool:
        """Answer a create that asks for a background response."""
        asked = read_create(down.body)
        if asked is None or not asked.background:
            return False
        if asked.request_id is not None and not RESPONSE_ID.fullmatch(asked.request_id):
            raise BadRequestError(
                _BAD_REQUEST,
                "request_id must be 1 to 128 letters, digits, dots, underscores or hyphens.",
                param="request_id",
            )
        begun = None
        while begun is None:  # another replica may begin it meanwhile
            if asked.request_id is not None and await self._follow_existing(down, asked, headers):
                return True
            mode = self._mode()
            if mode is RunMode.PROXY and asked.store is False:
                raise BadRequestError(
                    _BAD_REQUEST,
                    "background can only be used when `store` is true",
                    param="background",
                )
            begun = await self._begin(mode, down, asked, headers)
            if isinstance(begun, Answer) and self._store_is_off(mode, begun.status, begun.body):
                begun = await self._begin(RunMode.PROXY, down, asked, headers)
        if isinstance(begun, Answer):
            if not asked.stream:
                await self._keep_owner(down, begun)
            await self._answer(down, begun)
        elif asked.stream:
            await self._streams.follow(down, begun.run, FROM_THE_START, headers, head=begun.headers)
        else:
            down.record.response_id = begun.run.corrector.response_id
            await down.answer_json(_OK, as_queued(begun.run.created_response))
        return True

    async def retrieve(self, down: Downstream, response_id: str, headers: Pairs) -> bool:
        """Answer a GET of a response, or of its stream."""
        found: _Found | None = await self._find(down, response_id)
        if found is None:
            return False
        stream, after = read_query(down.target)
        if (why := why_no_events(found)) is not None:
            if stream:
                raise no_stream(why)
            if not isinstance(found, Run):
                return False  # vLLM may still know it
        if isinstance(found, Tombstone):
            return False
        if isinstance(found, CopyInfo) and found.ended_at is None:
            found = await self._runs.adopt(found, headers, follows=stream)
        if not stream:
            await down.answer_json(_OK, _object_of(found))
        elif isinstance(found, Run | RemoteRun):
            await self._streams.follow(down, found, after, headers)
        else:
            await self._streams.replay(down, found, after)
        return True

    async def cancel(self, down: Downstream, response_id: str, headers: Pairs) -> bool:
        """Answer a cancel; where vLLM makes the response, it is cancelled there first."""
        found: _Found | None = await self._find(down, response_id)
        if found is None or isinstance(found, Tombstone):
            return False
        if isinstance(found, CopyInfo) and is_object(found):
            return await self._cancel_object(down, headers)
        if isinstance(found, CopyInfo) and found.ended_at is None:
            found = await self._runs.adopt(found, headers)
        if isinstance(found, RemoteRun) or (isinstance(found, Run) and not found.corrector.ended):
            with found.followed():
                if found.mode is RunMode.UPSTREAM:
                    await self._vllm.cancel(down.target, headers)
                left = await self._runs.cancel(found)
            if left is None or isinstance(left, Tombstone):
                return False
            found = left
        snapshot = _object_of(found)
        status = status_of(snapshot)
        if status != "cancelled":
            if isinstance(found, CopyInfo) and status not in ENDED:
                return False
            raise cannot_cancel(status)
        await down.answer_json(_OK, snapshot)
        return True

    async def delete(self, down: Downstream, response_id: str, headers: Pairs) -> bool:
        """Answer a DELETE."""
        found = await self._find(down, response_id)
        if isinstance(found, Run) and found.corrector.ended:
            await found.closed.wait()  # its client has seen the end a moment before the store
            found = await self._find(down, response_id)
        if (
            isinstance(found, CopyInfo)
            and found.ended_at is None
            and status_of(found.snapshot) in ENDED
        ):  # the same, on another replica
            found = await self._runs.settled(found, headers)
        if found is None or isinstance(found, Tombstone):
            return False
        running = isinstance(found, Run) or found.ended_at is None
        if isinstance(found, CopyInfo) and is_object(found):
            answer = await self._vllm.get(down.target.partition(b"?")[0], headers)
            running = answer.status == _OK and status_of(answer.body) not in ENDED
        if running or isinstance(found, Run):
            raise BadRequestError(
                _BAD_REQUEST,
                "Cannot delete a response that is still in progress: cancel it first.",
                param="response_id",
            )
        await self._runs.delete(found.key)
        deleted = {"id": response_id, "object": "response", "deleted": True}
        await down.answer_json(_OK, json.dumps(deleted, separators=(",", ":")).encode())
        return True

    # Inside.

    def _mode(self) -> RunMode:
        background = self._settings.background
        if background is Background.AUTO:
            believed = asyncio.get_running_loop().time() < self._proxy_until
            return RunMode.PROXY if believed else RunMode.UPSTREAM
        return RunMode(background.value)

    def _store_is_off(self, mode: RunMode, status: int, body: bytes) -> bool:
        """Whether vLLM refused because its store is off, and the proxy may do it instead."""
        if (
            self._settings.background is not Background.AUTO
            or mode is not RunMode.UPSTREAM
            or status != _BAD_REQUEST
        ):
            return False
        payload = read_payload(body)
        error = read_payload(bytes(payload.error)) if payload and payload.error else None
        if error is None or _STORE_OFF not in (error.message or ""):
            return False
        self._proxy_until = asyncio.get_running_loop().time() + _PROXY_FOR_S
        return True

    async def _begin(
        self,
        mode: RunMode,
        down: Downstream,
        asked: CreateRequest,
        headers: Pairs,
    ) -> Begun | Answer | None:
        body = down.body
        up = to_foreground(body) if mode is RunMode.PROXY else body
        # A response that vLLM makes without a stream comes back as an answer, as it is.
        sized = [
            pair for pair in headers if pair[0] not in (b"content-length", b"transfer-encoding")
        ]
        sized.append((b"content-length", b"%d" % len(up)))
        target = down.target
        return await self._runs.begin(
            mode,
            self._owners.owner_of(down.headers),
            path=target.partition(b"?")[0],
            target=target,
            headers=sized,
            body=up,
            asked=body,
            request_id=asked.request_id,
        )

    async def _answer(self, down: Downstream, answer: Answer) -> None:
        """Pass upstream's answer as it is."""
        head = response_headers(
            answer.headers,
            request_id=down.request_id,
            event_stream=False,
            rewritten=True,
            decoded=False,
        )
        await down.answer(answer.status, head, answer.body)

    async def _keep_owner(self, down: Downstream, answer: Answer) -> None:
        """Keep whose a response is that vLLM makes without a stream."""
        payload = read_payload(b'{"response":%b}' % answer.body) if answer.status == _OK else None
        if payload is not None and payload.response_id is not None:
            owner = self._owners.owner_of(down.headers)
            await self._runs.keep_owner(owner, payload.response_id, down.body)

    async def _follow_existing(
        self, down: Downstream, asked: CreateRequest, headers: Pairs
    ) -> bool:
        """Answer a create whose ``request_id`` its owner has used already."""
        found: _Found | None = await self._find(down, asked.request_id or "", mine_only=True)
        if found is None or isinstance(found, Tombstone):
            return False
        meta = found.meta
        self._runs.check_same(meta, down.body)
        if isinstance(found, CopyInfo) and is_object(found):
            if await self._answer_object(down, found.key.response_id, headers):
                return True
            await self._runs.delete(found.key)  # a copy that stays would be found again for ever
            return False
        if isinstance(found, CopyInfo) and found.ended_at is None:
            found = await self._runs.adopt(found, headers, follows=asked.stream)
        if not asked.stream:
            await down.answer_json(_OK, _object_of(found))
        elif isinstance(found, Run | RemoteRun):
            await self._streams.follow(down, found, FROM_THE_START, headers)
        else:
            await self._streams.replay(down, found, FROM_THE_START)
        return True

    async def _answer_object(self, down: Downstream, response_id: str, headers: Pairs) -> bool:
        """Answer with the response as vLLM has it; False if it has it no longer."""
        target = b"%b/%b" % (down.target.partition(b"?")[0], response_id.encode())
        answer = await self._vllm.get(target, headers)
        if answer.status == _NOT_FOUND:
            return False
        await self._answer(down, answer)
        return True

    async def _cancel_object(self, down: Downstream, headers: Pairs) -> bool:
        """Answer a cancel of what vLLM keeps itself where its own answer would be wrong."""
        target = down.target.partition(b"?")[0].removesuffix(b"/cancel")
        answer = await self._vllm.get(target, headers)
        status = status_of(answer.body) if answer.status == _OK else None
        if status == "cancelled":
            await down.answer_json(_OK, answer.body)
            return True
        if status in ENDED:
            raise cannot_cancel(status)
        return False

    async def _find(
        self, down: Downstream, response_id: str, *, mine_only: bool = False
    ) -> Run | CopyInfo | Tombstone | None:
        down.record.response_id = brief(response_id)
        owner = self._owners.owner_of(down.headers)
        try:
            found = await self._runs.find(owner, response_id)
        except BadRequestError:
            if mine_only:
                return None
            raise
        if isinstance(found, Tombstone) and found.reason is Gone.DELETED and not mine_only:
            raise not_found(response_id)  # never asked from upstream
        return found


def _object_of(found: Run | RemoteRun | CopyInfo) -> bytes:
    """The response object as of now; for another replica's run, as it was when we looked."""
    return (found.info.snapshot if isinstance(found, RemoteRun) else found.snapshot) or b"{}"
