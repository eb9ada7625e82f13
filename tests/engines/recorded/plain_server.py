"""A server as light as can be: healthy, and silent on everything else. How long it lives is what tests look at."""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from paddock.engines.rollout.served import arguments_of_this_server


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        print("its last words", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    arguments = arguments_of_this_server()
    ThreadingHTTPServer((arguments["host"], arguments["port"]), Handler).serve_forever()
