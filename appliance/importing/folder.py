"""A Hugging Face folder as the normal form: config, safetensors entries and the files that are copied.

Names and shapes come from the headers; nothing is loaded. The rotary buffers that old checkpoints carry are left out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from appliance.errors import ModelError
from appliance.importing.safetensors import read_header
from appliance.importing.shapes import shape_refusal
from appliance.importing.source import EXTRAS, Source, merge_headers, read_config
from appliance.importing.tensors import NormalForm, StoredTensor


def open_folder(source: Source) -> NormalForm:
    """Read the headers of an inspected folder. Raises ModelError as `inspect` does."""
    config = read_config(source.path)
    merged = merge_headers(source.path, {file: read_header(file) for file in source.weights})
    if reason := shape_refusal(config, {name: entry.shape for name, (_, entry) in merged.items()}):
        raise ModelError(f"{source.path} is inconsistent", why=reason, do="download the model again")
    tensors = {
        name: StoredTensor(name=name, file=file, offset=e.offset, bytes=e.bytes, shape=e.shape, kind=e.dtype)
        for name, (file, e) in merged.items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    return NormalForm(kind="safetensors", config=config, tensors=tensors, write_extras=_copier(source, config))


def _copy_without_code(file: Path, target: Path) -> None:
    """A tokenizer's own code (`auto_map`) is never run: nobody shall be asked whether it may."""
    try:
        said = json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError):
        said = None
    if isinstance(said, dict) and said.pop("auto_map", None) is not None:
        target.write_text(json.dumps(said, indent=2, ensure_ascii=False) + "\n", "utf-8")
    else:
        shutil.copyfile(file, target)


def _copier(source: Source, config: Mapping[str, Any]) -> Callable[[Path], None]:
    def write(out: Path) -> None:
        for file in source.extras:
            if file.name == "tokenizer_config.json":
                _copy_without_code(file, out / file.name)
            elif file.name in EXTRAS:
                shutil.copyfile(file, out / file.name)
        if not (out / "generation_config.json").exists():
            ids = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
            ids = {key: value for key, value in ids.items() if value is not None}
            (out / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", "utf-8")

    return write
