"""Stored objects for tests: a random llama, quantized, with the manifest that gives its digest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from appliance.quantize.checkpoint import quantize
from appliance.quantize.layers import Recipe
from tests.quantize.models import LLAMA, random_tensors, write_random

DIGEST = "ab" * 32


def stored_object(folder: Path, *, recipe: Recipe | None = None, **config: Any) -> Path:
    """A quantized random llama as the store holds it."""
    whole: Mapping[str, Any] = LLAMA | config
    write_random(folder / "source", whole, tensors=random_tensors(whole))
    quantize(folder / "source", folder / "object", recipe or Recipe(), lambda event: None)
    (folder / "object" / "manifest.json").write_text(json.dumps({"digest": DIGEST}))
    return folder / "object"
