"""GGUF files against llama.cpp itself: its converter, its quantizer and its logits. `make test-gguf`."""
