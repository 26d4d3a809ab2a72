"""The part of the W&B service that its client talks to: one run, whose history is the rows that were sent, in order."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RUN = {"id": "cnVu", "displayName": "run", "project": {"name": "swarmtrain", "entity": {"name": "me"}}, "sweepName": None}


class WandbService(ThreadingHTTPServer):
    """A service that answers the client and records what it receives."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), WandbHandler)
        self.rows: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class WandbHandler(BaseHTTPRequestHandler):
    server: WandbService

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        request = json.loads(body or b"{}")
        if self.path.endswith("/file_stream"):
            history = (request.get("files") or {}).get("wandb-history.jsonl")
            if history:
                self.server.rows[history["offset"] :] = history["content"]
            self.send_json({})
            return
        self.send_json({"data": self.answer_query(request.get("query", ""), request.get("variables") or {})})

    def do_GET(self) -> None:
        self.send_json({})

    def answer_query(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": RUN["id"], "uploadHeaders": [], "files": []}}
        if "serverInfo" in query:
            return {"serverInfo": {"features": []}}
        if "upsertBucket" in query:
            return {
                "upsertBucket": {
                    "bucket": {**RUN, "name": variables.get("name"), "historyLineCount": len(self.server.rows)},
                    "inserted": not self.server.rows,
                }
            }
        if "historyTail" in query and self.server.rows:
            tail = json.dumps(self.server.rows[-1:])
            bucket = {
                **RUN,
                "name": variables.get("name"),
                "historyLineCount": len(self.server.rows),
                "eventsLineCount": 0,
                "logLineCount": 0,
            }
            bucket |= {
                "historyTail": tail,
                "eventsTail": "[]",
                "summaryMetrics": "{}",
                "config": "{}",
                "wandbConfig": '{"t": 1}',
                "tags": [],
            }
            return {"model": {"bucket": bucket}}
        if "viewer" in query:
            return {"viewer": {"id": "me", "entity": "me", "flags": "{}", "teams": {"edges": []}}}
        return {"model": {"bucket": None}}

    def send_json(self, answer: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def run_service() -> Iterator[WandbService]:
    """Run a service on a free local port."""
    with WandbService() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()
