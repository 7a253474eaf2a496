"""A chat endpoint in this process that behaves as a test tells it."""

import http.server
import json
import threading

KEY = "sk-secret-0123"


class Server:
    """An endpoint: `behave(call number, request) -> (status, headers, body)`; keeps requests.

    A body is bytes, or an iterable of (seconds to wait, bytes).
    """

    def __init__(self):
        self.requests, self.behave, self.free = [], None, threading.Event()
        self._lock = threading.Lock()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer._lock:
                    number = len(outer.requests)
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    outer.requests.append((self.path, headers, data))
                status, headers, body = outer.behave(number, data)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                for wait, chunk in body if not isinstance(body, bytes) else [(0, body)]:
                    if outer.free.wait(wait):
                        return
                    self.wfile.write(chunk)
                    self.wfile.flush()

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # a client may close the connection
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()

    def close(self):
        self.free.set()
        self._server.shutdown()
        self._server.server_close()


def chat(text):
    return 200, {}, json.dumps({"choices": [{"message": {"content": text}}]}).encode()
