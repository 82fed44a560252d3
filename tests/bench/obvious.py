"""The obvious way to correct the event, as an afternoon's work would do it: FastAPI and httpx."""

import json
import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

app = FastAPI()
client = httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None))


@app.post("/{path:path}")
async def relay(path: str, request: Request) -> Response:
    """Pass a request on, and its answer back with the last event renamed."""
    url, kind = f"{sys.argv[2]}/{path}", {"content-type": "application/json"}
    asked = client.build_request("POST", url, content=await request.body(), headers=kind)
    answer = await client.send(asked, stream=True)
    media_type = answer.headers["content-type"]
    if not media_type.startswith("text/event-stream"):
        return Response(await answer.aread(), answer.status_code, media_type=media_type)

    async def events() -> AsyncIterator[str]:
        event = ""
        async for line in answer.aiter_lines():
            event += line + "\n"
            if line:
                continue
            if event.startswith("event: response.completed"):
                data = json.loads(event.partition("data: ")[2])
                if data["response"]["status"] == "incomplete":
                    data["type"] = "response.incomplete"
                    event = f"event: response.incomplete\ndata: {json.dumps(data)}\n\n"
            yield event
            event = ""

    return StreamingResponse(events(), answer.status_code, media_type=media_type)


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
