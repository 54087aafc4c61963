"""A stand-in for the worker's Python: speaks the protocol of `-m appliance.quantize`, and can misbehave. It also
answers `-m appliance.worker --contract` and runs `-m appliance.kernels.prepare`, as FAKE_KERNELS and FAKE_PREPARE say.

What it does stands in SOURCE/behaviour.json:
    mode      ok | error | crash | silent | signal | fill | hang | junk | empty | deaf | large    (default ok)
    slices    number of pieces the weights are written in, `pause_s` seconds apart
    number    the signal to die by (mode signal)
    log       a file that gets one line for each run
It needs the standard library and the pure parts of the package, and ignores nothing of its command line.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from appliance import prepared

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
    "tie_word_embeddings": True, "quantization_config": {"quant_method": "cpu_int4", "group_size": 32},
}
LINEARS = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64),
           "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128)}
SHAPES: dict[str, tuple[str, list[int]]] = {"model.norm.weight": ("BF16", [64])}
for _module, (_n, _k) in {"model.embed_tokens": (256, 64), **{f"model.layers.{i}.{name}": size for i in range(2) for name, size in LINEARS.items()}}.items():
    SHAPES |= {f"{_module}.weight_packed": ("U8", [_n, _k // 2]), f"{_module}.weight_scale": ("BF16", [_n, _k // 32]),
               f"{_module}.weight_zero": ("BF16", [_n, _k // 32])}
for _norm in ("input_layernorm", "post_attention_layernorm"):
    SHAPES |= {f"model.layers.{i}.{_norm}.weight": ("BF16", [64]) for i in range(2)}


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def write(out: Path, slices: int, pause_s: float) -> None:
    (out / "config.json").write_text(json.dumps(CONFIG))
    (out / "tokenizer.json").write_text("{}")
    header, position = {}, 0
    for name, (dtype, shape) in SHAPES.items():
        size = math.prod(shape) * {"U8": 1, "BF16": 2}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + os.urandom(position)
    with open(out / "model.safetensors", "wb") as file:
        for i in range(slices):
            file.write(data[len(data) * i // slices : len(data) * (i + 1) // slices])
            file.flush()
            say(event="progress", done_bytes=i + 1, total_bytes=slices, item=f"slice {i}")
            time.sleep(pause_s)


def prepare(source: Path, target: Path) -> int:
    """A layout of one layer, with a real index; FAKE_PREPARE: ok, full or short."""
    mode = os.environ.get("FAKE_PREPARE", "ok")
    say(event="phase", phase="preparing", note="")
    if mode == "full":
        say(event="error", exit_code=73, what="the prepared layout cannot be written", why="the disk is full", do="")
        return 73
    digest = json.loads((source / "manifest.json").read_text())["digest"]
    size = prepared.run_bytes(64, 64, 32, 4)
    run = prepared.Run(name="a.q_proj", kind="linear", offset=0, bytes=size, n=64, k=64, group=32, bits=4, replaces=())
    data = bytes(size)
    index = prepared.Index(source=digest, bytes=size, sha256=hashlib.sha256(data).hexdigest(), runs=(run,), left_out=())
    (target / prepared.WEIGHTS).write_bytes(data[1:] if mode == "short" else data)
    (target / prepared.INDEX).write_text(prepared.write_index(index))
    say(event="result", report={"layers": 1})
    return 0


def main() -> int:
    args = sys.argv[1:]
    if args[:2] == ["-m", "appliance.worker"]:
        kernels = os.environ.get("FAKE_KERNELS", "aten").split(",")
        print(json.dumps({"contract": {"major": 1, "minor": 0}, "versions": {}, "kernels": kernels}))
        return 0
    if args[:2] == ["-m", "appliance.kernels.prepare"]:
        return prepare(Path(args[2]), Path(args[3]))
    if args[:2] == ["-m", "appliance.evaluate"]:
        pair = "--source" in args
        text = args[args.index("--text") + 1] if "--text" in args else "the language reference of Python"
        say(event="result", report={
            "tokens": int(args[args.index("--tokens") + 1]), "perplexity": 12.5, "source_perplexity": 12.0 if pair else None,
            "same_first_choice": 0.95 if pair else None, "divergence": 0.0123 if pair else None, "mean_difference": 0.05 if pair else None,
            "largest_difference": 1.25 if pair else None, "streamed": True, "text": text, "text_digest": "0123456789ab", "peak_bytes": 1 << 30})
        return 0
    assert [*args[:2], args[4]] == ["-m", "appliance.quantize", "--recipe"], args
    source, out, recipe = Path(args[2]), Path(args[3]), json.loads(args[5])
    behaviour = json.loads((source / "behaviour.json").read_text()) if (source / "behaviour.json").exists() else {}
    mode = behaviour.get("mode", "ok")
    if "log" in behaviour:
        with open(behaviour["log"], "a") as log:
            log.write(json.dumps({"recipe": recipe, "env": dict(os.environ), "cwd": str(Path.cwd())}) + "\n")
    say(event="phase", phase="reading", note="")
    if mode == "error":
        say(event="error", exit_code=65, what="tensor x cannot be quantized", why="it holds NaN", do="use another copy")
        return 65
    if mode == "crash":
        raise RuntimeError("no such luck")
    if mode == "silent":
        return 0
    say(event="phase", phase="quantizing", note="")
    if mode == "signal":
        (out / "model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), behaviour["number"])
        time.sleep(10)
    if mode == "fill":
        try:
            with open(out / "model.safetensors", "wb") as file:
                for _ in range(400):
                    file.write(bytes(1 << 20))
        except OSError as error:
            say(event="error", exit_code=73, what="cannot write the checkpoint", why=error.strerror, do="free space")
            return 73
    if mode == "hang":  # deaf to SIGTERM, and with a child of its own
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "60"])
        (out / "pids").write_text(f"{os.getpid()} {child.pid}")
        say(event="progress", done_bytes=1, total_bytes=10, item="hanging")
        time.sleep(60)
    if mode == "deaf":  # goes on although nobody reads: a writer that outlives its killed parent
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        (out / "pid").write_text(str(os.getpid()))
        time.sleep(60)
    if mode == "junk":
        print("WARNING: a library says hello", flush=True)
        print('{"no": "event"}\n[1, 2]\n"text"\n{"event": 7}\n\xff', flush=True)
        sys.stdout.write("x" * (3 << 20) + "\n")
    write(out, behaviour.get("slices", 4), behaviour.get("pause_s", 0))
    if mode == "large":
        (out / "more.json").write_bytes(b" " * (8 << 20))
    if mode == "empty":
        (out / "model-00002.safetensors").write_bytes(b"")
    say(event="phase", phase="writing", note="")
    say(event="result", report={"parameters": 16384, "group_size": 32, "bits_per_weight": 5.0, "kept": []})
    return 0


if __name__ == "__main__":
    sys.exit(main())
