"""A transformers model that never holds its weights: each module reads its own when it runs and lets them go after.

Does: build any causal model that transformers knows, give the last hidden states of a batch, then logits by blocks of
positions. Does not: generate, cache, or change a weight. Runs in the worker's environment.
Rules: everything is computed in float32; a table is read by the rows that occur, a head by blocks of rows, so the peak
is the largest layer and not the model; each weight is read once for WINDOWS_AT_ONCE windows. Where transformers stores
a model's weights under other names than the checkpoint (fused experts), the whole model is loaded in float32 instead,
and `streamed` says so. Code of the model's own repository is never run.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from appliance.errors import ApplianceError, ModelError
from appliance.evaluate.weights import Weights
from appliance.quantize.layers import is_head

if TYPE_CHECKING:
    import torch

Visit = Callable[[str, "torch.Tensor", "torch.Tensor"], "torch.Tensor | None"]
BLOCK_ELEMENTS = 1 << 24
"""Values of a head held at once: 64 MB in float32."""
WINDOWS_AT_ONCE = 8
"""What a layer computes grows with them, some 1 GB for an 8e9-parameter model; each group reads the weights again."""


class Model:
    """`folder`: where config.json is (a stored model); `weights`: of that model or of the one it was made from.

    `visit(module, input, weight)` sees each linear of `wanted` when it runs and may answer with another weight to go on
    with. Raises ModelError when transformers cannot build the model, or (with `visit`) not without its weights.
    """

    def __init__(self, folder: Path, weights: Weights, *, visit: Visit | None = None,
                 wanted: Container[str] = ()) -> None:
        self._weights = weights
        self._visit, self._wanted = visit, wanted
        self._model = _built(folder)
        self._head = self._model.get_output_embeddings()
        self._hidden: torch.Tensor | None = None
        found = [(name, module) for name, module in self._model.named_modules() if module._parameters]
        self.streamed = all(self._named(name, module) for name, module in found)
        """False: the whole model is in memory."""
        if not self.streamed and visit is not None:
            raise ModelError("the model cannot be run layer by layer",
                             why="transformers stores its weights under other names")
        if not self.streamed:
            self._model = _whole(self._model.config, weights)
            return
        for name, module in found:
            if module is self._head:
                module.forward = self._head_forward(name, module)
            elif module is self._model.get_input_embeddings():
                module.register_forward_pre_hook(self._row_reader(name))
                module.register_forward_hook(_let_go)
            else:
                module.register_forward_pre_hook(self._reader(name))
                module.register_forward_hook(_let_go)

    def read(self, windows: torch.Tensor, first: int = 0) -> None:
        """Run all layers over token ids [n, length]; then `logits` may be called.

        Kept are the hidden states from position `first` of each window on, but the last one's, window after window.
        """
        import torch

        at_once = WINDOWS_AT_ONCE if self._visit is None else len(windows)  # a visitor sees each linear once
        parts = []
        for some in windows.split(at_once):
            with torch.no_grad(), _one_line():
                hidden = self._model.base_model(input_ids=some, use_cache=False)[0]
            parts.append(hidden[:, first:-1].reshape(1, -1, hidden.shape[-1]).clone())

        class Layers(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
            """Stands where the layers were: answers with the block of hidden states in work."""

            decoder = property(lambda self: self)  # some classes ask the part that holds the layers

            def forward(self, *_: Any, **__: Any) -> Any:
                return _States(self.block)

        self._layers = Layers()
        setattr(self._model, self._model.base_model_prefix, self._layers)
        self._hidden = torch.cat(parts, dim=1)

    def logits(self, start: int, stop: int) -> torch.Tensor:
        """Float32 [stop - start, vocabulary]: what follows the kept positions [start, stop).

        The class's own head runs on the kept states, so that its scaling and soft capping are in.
        """
        import torch

        assert self._hidden is not None
        self._layers.block = self._hidden[:, start:stop]
        with torch.no_grad(), _one_line():
            ids = torch.zeros((1, stop - start), dtype=torch.long)
            return self._model(input_ids=ids, use_cache=False).logits[0].float()

    def _stored(self, name: str) -> str | None:
        """The name under which a parameter is stored; a head may have another than its own, or be the tied table."""
        if name in self._weights:
            return name
        module, _, part = name.rpartition(".")
        if self._head is None or self._model.get_submodule(module) is not self._head:
            return None
        other = next((key.rpartition(".")[0] for key in self._weights if is_head(key)), None)
        if other is None and self._model.config.tie_word_embeddings:
            table = self._model.get_input_embeddings()
            other = next(key for key, found in self._model.named_modules() if found is table)
        return f"{other}.{part}" if f"{other}.{part}" in self._weights else None

    def _named(self, name: str, module: torch.nn.Module) -> bool:
        """Whether every parameter of this module is stored under its name and in its shape."""
        for part, parameter in module._parameters.items():
            if parameter is None:
                continue
            stored = self._stored(f"{name}.{part}")
            if stored is None or self._weights[stored].shape != tuple(parameter.shape):
                return False
        return True

    def _reader(self, name: str) -> Any:
        import torch

        seen = self._visit if name in self._wanted else None

        def read(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            for part, parameter in module._parameters.items():
                if parameter is not None:
                    values = self._weights[str(self._stored(f"{name}.{part}"))].whole()
                    if seen is not None and part == "weight" and isinstance(module, torch.nn.Linear):
                        other = seen(name, inputs[0], values)
                        values = values if other is None else other
                    module._parameters[part] = torch.nn.Parameter(values, requires_grad=False)

        return read

    def _row_reader(self, name: str) -> Any:
        import torch

        def read(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            used, where = inputs[0].unique(return_inverse=True)
            weight = self._weights[f"{name}.weight"]
            rows = torch.cat([weight.read(row, row + 1) for row in used.tolist()])
            module._parameters["weight"] = torch.nn.Parameter(rows, requires_grad=False)
            return (where, *inputs[1:])

        return read

    def _head_forward(self, name: str, module: torch.nn.Module) -> Any:
        import torch

        weight = self._weights[str(self._stored(f"{name}.weight"))]
        biased = module._parameters.get("bias") is not None
        bias = self._weights[str(self._stored(f"{name}.bias"))].whole() if biased else None
        step = max(1, BLOCK_ELEMENTS // weight.shape[-1])

        def forward(states: torch.Tensor) -> torch.Tensor:
            out = torch.empty((*states.shape[:-1], weight.rows))
            for start in range(0, weight.rows, step):
                stop = min(start + step, weight.rows)
                out[..., start:stop] = states @ weight.read(start, stop).T
            return out if bias is None else out + bias

        return forward


class _States:
    """What the layers of any class answer with: the hidden states, and None for all that was not asked for."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, _: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, _: str) -> None:
        return None


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """The code of a model's class raises whatever it meets; files and disks have words of their own."""
    try:
        yield
    except (ApplianceError, OSError):
        raise
    except Exception as error:
        raise ModelError("this model cannot be run", why=f"{type(error).__name__}: {str(error)[:160]}",
                         do="report the model's architecture") from error


def _let_go(module: torch.nn.Module, _: Any, __: Any) -> None:
    import torch

    for part, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[part] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)


def _built(folder: Path) -> Any:
    """The model of a folder's config.json, without any weights."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        with _weightless():
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, trust_remote_code=False, attn_implementation=_attention(config))
    except Exception as error:  # the library raises whatever it meets; one line for all of it
        raise ModelError("this model cannot be evaluated", do="see which architectures docs/quantization.md lists",
                         why=f"transformers cannot build it: {type(error).__name__}: {str(error)[:160]}") from error
    return model.eval()


def _attention(config: Any) -> str:
    """Torch's own attention, which needs less memory, knows no soft caps and leaves them out without a word."""
    return "eager" if getattr(config, "attn_logit_softcapping", None) else "sdpa"


@contextlib.contextmanager
def _weightless() -> Iterator[None]:
    """Parameters made inside are empty (device meta); buffers, which are computed, are real."""
    import torch

    register = torch.nn.Module.register_parameter

    def empty(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None:
            module._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)

    torch.nn.Module.register_parameter = empty
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


def _whole(config: Any, weights: Weights) -> Any:
    """The model with all of its weights, under whatever names transformers gives them."""
    import torch
    import transformers
    from safetensors.torch import save_file

    # By way of files, since only its loader knows how transformers renames and joins tensors.
    with tempfile.TemporaryDirectory(prefix="weights-") as name:
        config.save_pretrained(name)
        values = {key: weight.whole().contiguous() for key, weight in weights.items()}
        save_file(values, Path(name) / "model.safetensors", metadata={"format": "pt"})
        del values
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.float32, output_loading_info=True, trust_remote_code=False,
            attn_implementation=_attention(config))
    wrong = [*report["unexpected_keys"], *report["mismatched_keys"],
             *(key for key in report["missing_keys"] if not config.tie_word_embeddings or "lm_head" not in key)]
    if wrong:
        raise ModelError("this model cannot be evaluated", why=f"transformers does not know its tensor {wrong[0]}",
                         do="report the model's architecture")
    return model.eval()
