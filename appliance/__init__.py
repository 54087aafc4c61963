"""An LLM service for CPU-only edge nodes: probe, plan, quantize to 4 bits, supervise a vLLM CPU worker."""

__version__ = "0.1.0"
