"""The fallback, served: torch's own int4 kernel keeps its safety rule under several users (setting `kernel: aten`)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.served.conftest import RECORDER, serve

pytestmark = pytest.mark.served


@pytest.mark.last
def test_never_more_than_one_row_in_torchs_int4_kernel(home: Path) -> None:
    """Runs after the default model's tests, in their home: the service there has been stopped by then."""
    record = home / "torch.jsonl"
    service = serve(home, settings=f"kernel: aten\nworker: {{env: {{PYTHONPATH: {RECORDER}, VLLM_PLUGINS: 'cpu_int4,int4_recorder', "
                                   f"INT4_RECORD: {record}}}}}\n")
    client = openai.OpenAI(base_url=service.base_url, api_key="none", timeout=600, max_retries=0)

    def ask(number: int) -> int:
        done = client.completions.create(model="default", prompt=f"User {number} asks about", max_tokens=12, temperature=0,
                                         extra_body={"ignore_eos": True})
        return done.usage.completion_tokens if done.usage else 0

    try:
        for users in (1, 2, 7):
            with ThreadPoolExecutor(users) as pool:
                assert list(pool.map(ask, range(users))) == [12] * users
    finally:
        code, _ = service.stop()
    assert code == 0
    calls = [line for line in record.read_text().splitlines() if line]
    assert calls, "the recorder saw no call at all"
    assert all('"rows": 1,' in line or '"rows": 1}' in line for line in calls)
    assert "(torch's, " in (home / "state" / "worker.log").read_text()
