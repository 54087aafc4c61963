"""What a model source is: a GGUF file, a Hugging Face folder or a folder that is already `cpu_int4`.

`inspect(path)` looks at names, first bytes, config.json and safetensors headers only (standard library, no torch), so
the agent can refuse a source before it starts a child. It does not read weights and converts nothing.
Rules: every refusal is one ModelError line that names the file and the cause; all missing shards are named at once;
other quantized formats are refused by name; a split GGUF is given by its first part; code that a model brings
(`auto_map`) is never run and its mention not taken over; what is copied as it is must lie within the folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from appliance.errors import ModelError
from appliance.importing.safetensors import DoubleName, Entry, foreign_content, read_header, without_doubles
from appliance.quantize.format import QUANT_METHOD

Kind = Literal["gguf", "safetensors", "cpu_int4"]
INDEX = "model.safetensors.index.json"
EXTRAS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)
"""Files of a folder that are taken over beside config.json and the weights."""
METHODS = {
    "gptq": "GPTQ", "awq": "AWQ", "bitsandbytes": "bitsandbytes", "fp8": "fp8", "fbgemm_fp8": "fp8",
    "compressed-tensors": "compressed-tensors", "modelopt": "ModelOpt", "mxfp4": "MXFP4",
}
TEMPLATE = "chat_template.jinja"
OBJECTS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "generation_config.json",
           "chat_template.json")
"""JSON objects that a worker reads when it starts: a damaged one would be found only then."""
MOST_BYTES = {"config.json": 16 << 20, INDEX: 64 << 20, TEMPLATE: 1 << 20, **dict.fromkeys(OBJECTS, 16 << 20)}
"""Files that are read here; the others that are taken over are bounded by OTHER_BYTES."""
OTHER_BYTES = 256 << 20
UNQUANTIZED = "use the bf16 or fp16 folder, or a GGUF file, of the same model"


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source that can be read. `weights`: weight files; `extras`: config, tokenizer, templates; `bytes`: of all."""

    kind: Kind
    path: Path
    weights: tuple[Path, ...]
    extras: tuple[Path, ...]
    bytes: int

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file whose content decides the result (what a source digest covers)."""
        return self.weights + self.extras


def inspect(path: Path | str) -> Source:
    """Say what `path` is. Raises ModelError (one line, exit code 65) when it cannot be used."""
    path = Path(path)
    try:
        if path.is_file():
            return _gguf(path)
        if path.is_dir():
            return _folder(path)
        missing = not path.exists()
    except OSError as error:
        raise ModelError(f"{path} cannot be read", why=str(error.strerror), do="check its permissions") from None
    if missing:
        raise ModelError(f"{path} does not exist", do="give the path of a GGUF file or of a Hugging Face folder")
    raise ModelError(f"{path} is neither a file nor a folder", do="give a GGUF file or a Hugging Face folder")


def _source(kind: Kind, path: Path, weights: list[Path], extras: list[Path]) -> Source:
    return Source(kind=kind, path=path, weights=tuple(weights), extras=tuple(extras),
                  bytes=sum(file.stat().st_size for file in weights + extras))


def _gguf(path: Path) -> Source:
    def refuse(why: str, do: str = "download the file again") -> ModelError:
        return ModelError(f"{path} is not a usable GGUF file", why=why, do=do)

    if path.suffix == ".safetensors":
        read_header(path)
        raise ModelError(f"{path} is a single safetensors file", why="config.json and the tokenizer stand beside it",
                         do=f"give the folder {path.parent}")
    foreign = foreign_content(path)
    if foreign:
        raise refuse(foreign)
    with open(path, "rb") as file:
        start = file.read(24)
    if start[:4] != b"GGUF":
        raise refuse(f"it begins with {start[:4].hex()}, not with the letters GGUF",
                     "give a GGUF file or a Hugging Face folder")
    version = int.from_bytes(start[4:8], "little")
    if len(start) < 24 or version not in (2, 3):
        raise refuse("it is cut short inside its header" if len(start) < 24 else f"its version {version} is not 2 or 3")
    part = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if not part:
        return _source("gguf", path, [path], [])
    if int(part[2]) != 1:
        raise refuse(f"it is part {int(part[2])} of {int(part[3])} of a split model",
                     f"give the first part, {part[1]}-00001-of-{part[3]}.gguf")
    parts = [path.with_name(f"{part[1]}-{i:05d}-of-{part[3]}.gguf") for i in range(1, int(part[3]) + 1)]
    _require(path, parts)
    return _source("gguf", path, parts, [])


def _require(path: Path, files: list[Path]) -> None:
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        more = f" and {len(missing) - 20} more" if len(missing) > 20 else ""
        raise ModelError(f"{path} is incomplete", why=f"missing: {', '.join(missing[:20])}{more}",
                         do="download the missing files")


def _counts(name: str) -> bool:
    return name in ("config.json", INDEX, *EXTRAS) or name.endswith(".safetensors")


def _folder(path: Path) -> Source:
    names = {file.name for file in path.iterdir()}
    if not names:
        raise ModelError(f"{path} is an empty folder", do="give the path of a GGUF file or of a Hugging Face folder")
    if "config.json" not in names:
        ggufs = sorted(name for name in names if name.endswith(".gguf"))
        if ggufs:
            raise ModelError(f"{path} holds GGUF files but no config.json", why=", ".join(ggufs[:3]),
                             do=f"give the path of one file, such as {path / ggufs[0]}")
        raise ModelError(f"{path} is not a Hugging Face folder", why="it has no config.json", do="download it again")
    odd = sorted(name for name in names if _counts(name) and not (path / name).is_file())
    if odd:
        raise ModelError(f"{path} cannot be used", why=f"{odd[0]} is not a regular file", do="download the model again")
    for name in sorted(names & {"config.json", INDEX, *EXTRAS}):
        if reason := _taken_refusal(path, name):
            raise ModelError(f"{path} cannot be used", why=f"{name} {reason}", do="download the model again")
    config = read_config(path)
    kind: Kind = "safetensors"
    method = quant_method(config)
    if method == QUANT_METHOD:
        kind = "cpu_int4"
    elif method is not None:
        raise ModelError(f"{path} is already quantized", do=UNQUANTIZED,
                         why=f"{METHODS.get(method, method)} weights cannot be converted")
    weights = weight_files(path)
    headers = {file: read_header(file) for file in weights}
    merge_headers(path, headers)
    if kind == "safetensors":
        _refuse_quantized(path, headers)
    if "tokenizer.json" not in names:
        raise ModelError(f"{path} has no tokenizer", why="tokenizer.json is missing",
                         do="download it, or write it with AutoTokenizer.from_pretrained(...).save_pretrained(...)")
    foreign = foreign_content(path / "tokenizer.json")
    if foreign:
        raise ModelError(f"{path / 'tokenizer.json'} is not a tokenizer", why=foreign, do="download the file again")
    extras = [path / "config.json"] + [path / name for name in EXTRAS if name in names]
    if kind == "cpu_int4" and INDEX in names:
        extras.append(path / INDEX)
    return _source(kind, path, weights, extras)


def _taken_refusal(path: Path, name: str) -> str | None:
    """Why a small file of a folder is not parsed or copied, or None."""
    size, most = (path / name).stat().st_size, MOST_BYTES.get(name, OTHER_BYTES)
    if size > most:
        return f"has {size} bytes; at most {most} are allowed"
    if (path / name).is_symlink():
        root, target = path.resolve(), (path / name).resolve()
        cache = root.parents[1] / "blobs" if root.parent.name == "snapshots" else root  # Hugging Face's own cache
        if not target.is_relative_to(root) and not target.is_relative_to(cache):
            return f"is a link out of the folder, to {target}"
    try:
        text = (path / name).read_text("utf-8") if name in (TEMPLATE, *OBJECTS) else ""
        return None if name not in OBJECTS or isinstance(json.loads(text), dict) else "is not a JSON object"
    except (ValueError, RecursionError):
        return "is not UTF-8 text" if name == TEMPLATE else "is not valid JSON"


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder. Raises ModelError when it is not a JSON object that names an architecture."""
    file = path / "config.json"
    foreign = foreign_content(file)
    if file.stat().st_size > MOST_BYTES["config.json"]:
        foreign = f"it has {file.stat().st_size} bytes; at most {MOST_BYTES['config.json']} are allowed"
    try:
        config = json.loads(file.read_text("utf-8")) if not foreign else None
    except (ValueError, RecursionError):
        foreign = "it is not valid JSON"
    if foreign or not isinstance(config, dict):
        raise ModelError(f"{file} is not a model configuration", why=foreign or "it is not a JSON object",
                         do="download the file again")
    named = config.get("architectures")
    if not named or not isinstance(named, list) or not isinstance(named[0], str):
        raise ModelError(f"{file} is not a model configuration", why="it names no `architectures`",
                         do="use a model that was saved with transformers")
    config.pop("auto_map", None)
    return config


def quantization_config(config: Mapping[str, Any]) -> Any:
    """The quantization section of a configuration, wherever a writer puts it; None for plain weights."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            if place.get(key):
                return place[key]
    return None


def quant_method(config: Mapping[str, Any]) -> str | None:
    """`quant_method` of a configuration; None for plain weights."""
    raw = quantization_config(config)
    if not raw:
        return None
    named = raw.get("quant_method") if isinstance(raw, Mapping) else None
    if named is None and isinstance(raw, Mapping) and (raw.get("load_in_4bit") or raw.get("load_in_8bit")):
        named = "bitsandbytes"
    return str(named or "an unnamed quantization method")


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a folder, by its index or by name. Raises ModelError naming every missing shard."""
    index = path / INDEX
    if index.is_file():
        try:
            files = sorted(set(_weight_map(index).values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"it names {error} twice" if isinstance(error, DoubleName) else "it has no weight_map"
            raise ModelError(f"{index} is not a weight index", why=why, do="download it again") from None
        if any(Path(name).name != name or not name.endswith(".safetensors") for name in files):
            raise ModelError(f"{index} cannot be used", why="it names files outside its folder, or of another kind",
                             do="download it again")
        _require(path, [path / name for name in files])
        return [path / name for name in files]
    found = sorted(file.name for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if "model.safetensors" in found:
        return [path / "model.safetensors"]
    if not found:
        pickled = sorted(file.name for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
        if pickled:
            raise ModelError(f"{path} has only pickled weights", why=f"{pickled[0]} can run code when it is loaded",
                             do="use a folder with .safetensors files")
        raise ModelError(f"{path} has no weights", why="there is no .safetensors file", do="download the model again")
    for name in found:
        part = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.safetensors", name)
        if part:
            count = int(part[2])
            _require(path, [path / f"{part[1]}-{i:05d}-of-{part[2]}.safetensors" for i in range(1, count + 1)])
    return [path / name for name in found]


def merge_headers(path: Path, headers: Mapping[Path, Mapping[str, Entry]]) -> dict[str, tuple[Path, Entry]]:
    """Tensor name -> (file, entry) over all shards. Raises ModelError when a tensor is missing or stands twice."""
    merged: dict[str, tuple[Path, Entry]] = {}
    for file, entries in headers.items():
        for name, entry in entries.items():
            if name in merged:
                raise ModelError(f"{path} is inconsistent", do="download the model again",
                                 why=f"tensor {name} stands in {merged[name][0].name} and in {file.name}")
            merged[name] = (file, entry)
    index = path / INDEX
    if index.is_file():
        listed = _weight_map(index)
        absent = sorted(name for name in listed if name not in merged)
        elsewhere = [name for name, file in listed.items() if name in merged and merged[name][0].name != file]
        if absent:
            raise ModelError(f"{path} is incomplete", why=f"the index names {len(absent)} tensors that no shard holds, "
                             f"the first is {absent[0]}", do="download the model again")
        if elsewhere:
            raise ModelError(f"{path} is inconsistent", do="download the model again",
                             why=f"the index says that {elsewhere[0]} stands in {listed[elsewhere[0]]}, "
                                 f"it stands in {merged[elsewhere[0]][0].name}")
    return merged


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name. Raises ValueError and its like when it is no such mapping."""
    if index.stat().st_size > MOST_BYTES[INDEX]:
        raise ValueError("too large")
    mapped = json.loads(index.read_text("utf-8"), object_pairs_hook=without_doubles)["weight_map"]
    if not isinstance(mapped, dict) or not mapped or not all(isinstance(name, str) for name in mapped.values()):
        raise ValueError("no mapping")
    return mapped


def _refuse_quantized(path: Path, headers: Mapping[Path, Mapping[str, Entry]]) -> None:
    for entries in headers.values():
        for name, entry in entries.items():
            found = None
            if entry.dtype.startswith("F8_"):
                found = "fp8"
            elif name.endswith((".qweight", ".qzeros")):
                found = "GPTQ or AWQ"
            elif name.endswith((".absmax", ".quant_map")) or ".quant_state." in name:
                found = "bitsandbytes"
            if found:
                raise ModelError(f"{path} is already quantized", why=f"{found} weights cannot be converted ({name})",
                                 do=UNQUANTIZED)
