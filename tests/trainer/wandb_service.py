"""What of W&B's service its client talks to: one run, whose history is the rows that were sent, in their order."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RUN = {"id": "cnVu", "displayName": "run", "project": {"name": "swarmtrain", "entity": {"name": "me"}}, "sweepName": None}


class Service(ThreadingHTTPServer):
    """Answers the client, and keeps what it is told."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.rows: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        told = json.loads(body or b"{}")
        if self.path.endswith("/file_stream"):
            part = (told.get("files") or {}).get("wandb-history.jsonl")
            if part:
                self.server.rows[part["offset"] :] = part["content"]
            self.say({})
            return
        self.say({"data": self.answer(told.get("query", ""), told.get("variables") or {})})

    def do_GET(self) -> None:
        self.say({})

    def answer(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
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

    def say(self, answer: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def answering() -> Iterator[Service]:
    """Run a service of one's own."""
    with Service() as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        yield server
        server.shutdown()
