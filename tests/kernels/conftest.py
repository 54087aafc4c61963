from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def vllm_context() -> Iterator[None]:
    """Inside vLLM's configuration, with bf16 as torch's default type, as in its engine."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(VllmConfig()):
            yield
    finally:
        torch.set_default_dtype(before)
