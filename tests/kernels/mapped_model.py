"""`python mapped_model.py MODEL [PREPARED]`: load a stored object by real vLLM and say where its weights are.

One JSON line: the log-probabilities of a prompt, the parameters that hold weights, and the mapping's lines of smaps.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "cpu_int4", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
                   "GLOO_SOCKET_IFNAME": "lo"}
    if len(sys.argv) > 2:
        os.environ["APPLIANCE_PREPARED"] = sys.argv[2]
    from vllm import LLM, SamplingParams
    llm = LLM(sys.argv[1], load_format="cpu_int4", enforce_eager=True, max_model_len=64, max_num_seqs=2, skip_tokenizer_init=True,
              kv_cache_memory_bytes=16 << 20, model_loader_extra_config={"enable_weights_track": True})
    result = llm.generate([{"prompt_token_ids": [5, 17, 3, 60, 22, 41]}],
                          SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False))[0]
    logprobs = [next(iter(entry.values())).logprob for entry in result.prompt_logprobs[1:]]
    model = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    print("\n" + json.dumps({
        "logprobs": logprobs, "smaps": smaps("weights.bin"),
        "parameters": sorted({name.rpartition(".")[2] for name, _ in model.named_parameters()}),
        "blocked": sum(name.endswith("int4_blocked") for name, _ in model.named_parameters()),
    }))


def smaps(file: str) -> dict[str, int]:
    """Sums of the mapping's figures in bytes; empty when this process does not map the file."""
    sums: dict[str, int] = {}
    ours = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            words = line.split()
            if "-" in words[0]:
                ours = words[-1].endswith(file)
                if ours:
                    sums[f"rights {words[1]}"] = 1
            elif ours and words[-1] == "kB":
                sums[words[0][:-1]] = sums.get(words[0][:-1], 0) + 1024 * int(words[1])
    return sums


if __name__ == "__main__":
    main()
