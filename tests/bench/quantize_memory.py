"""Peak memory and speed of quantizing a synthetic 1B-parameter sharded bf16 Llama.

    worker_python tests/bench/quantize_memory.py [--limit-mb 1500]

Writes the model (2.2 GB of pseudo-random bf16) and its checkpoint (0.7 GB) into a temporary directory, runs
`python -m appliance.quantize` as the agent does and prints its peak resident memory (ru_maxrss of the child) and rate.
Exits 1 above the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HIDDEN, LAYERS, MLP, HEADS, KV_HEADS, VOCAB = 2048, 16, 8192, 32, 8, 49152
SHARD_LAYERS = 4


def shapes() -> list[list[tuple[str, list[int]]]]:
    """Tensor names and shapes, one list for each shard."""
    kv = HIDDEN // HEADS * KV_HEADS
    shards = [[("model.embed_tokens.weight", [VOCAB, HIDDEN]), ("model.norm.weight", [HIDDEN])]]
    for i in range(LAYERS):
        if i % SHARD_LAYERS == 0:
            shards.append([])
        layer = f"model.layers.{i}"
        shards[-1] += [
            (f"{layer}.self_attn.q_proj.weight", [HIDDEN, HIDDEN]), (f"{layer}.self_attn.k_proj.weight", [kv, HIDDEN]),
            (f"{layer}.self_attn.v_proj.weight", [kv, HIDDEN]), (f"{layer}.self_attn.o_proj.weight", [HIDDEN, HIDDEN]),
            (f"{layer}.mlp.gate_proj.weight", [MLP, HIDDEN]), (f"{layer}.mlp.up_proj.weight", [MLP, HIDDEN]),
            (f"{layer}.mlp.down_proj.weight", [HIDDEN, MLP]), (f"{layer}.input_layernorm.weight", [HIDDEN]),
            (f"{layer}.post_attention_layernorm.weight", [HIDDEN]),
        ]
    return shards


def write_model(folder: Path) -> int:
    """Write the model with a little pool of random values, row by row; returns its bytes."""
    import torch

    pool = (torch.randn(1 << 22) * 0.02).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    parts, weight_map, total = shapes(), {}, 0
    for number, tensors in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        header, offset = {}, 0
        for tensor, shape in tensors:
            size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
            weight_map[tensor] = name
            offset += size
        text = json.dumps(header).encode()
        with open(folder / name, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            left = offset
            while left:
                left -= file.write(pool[: min(left, len(pool))])
        total += offset
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "intermediate_size": MLP, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-5, "max_position_embeddings": 8192}))
    (folder / "tokenizer.json").write_text("{}")
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit-mb", type=int, default=1500)
    parser.add_argument("--directory", help="where the temporary files go")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        folder, out = Path(name, "source"), Path(name, "out")
        folder.mkdir()
        # The model is written by another process: a child's peak begins with the memory of the process that forks it.
        pid = os.fork()
        if pid == 0:
            write_model(folder)
            os._exit(0)
        if os.waitpid(pid, 0)[1] != 0:
            return 1
        total = sum(file.stat().st_size for file in folder.iterdir())
        before = time.monotonic()
        run = subprocess.run([sys.executable, "-m", "appliance.quantize", str(folder), str(out), "--recipe", "{}"],
                             stdout=subprocess.PIPE, text=True, check=False)
        seconds = time.monotonic() - before
        last = json.loads(run.stdout.splitlines()[-1])
        if run.returncode:
            print(last)
            return 1
        # The larger of the two children; the one that wrote the model holds torch and little else.
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        report = last["report"]
        print(f"{report['parameters'] / 1e9:.2f}e9 parameters, group {report['group_size']}, "
              f"{report['bits_per_weight']} bits per weight")
        print(f"peak {peak:.0f} MiB (limit {args.limit_mb}), {seconds:.0f} s, {total / seconds / 1e6:.0f} MB/s of "
              f"source, {report['out_bytes'] / 1e6:.0f} MB written")
        return int(peak > args.limit_mb)


if __name__ == "__main__":
    sys.exit(main())
