"""The import rules of docs/architecture.md, read from the source: imports point downwards, heavy ones stay at the edges."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "appliance"
LAYERS = {
    1: ("errors", "facts", "parsers", "readers", "settings", "quantize.format", "prepared", "pieces"),
    2: ("plan", "ladder", "measured", "tuning", "refusal", "threads", "engines", "budget", "fitting", "bounds", "decisions", "launch", "vitals", "faults", "recovery", "trial", "metrics", "symptoms", "doctor", "scrub"),
    3: ("probe", "store", "draft", "laidout", "patrol", "manifest", "disk", "keys", "directories", "digests", "identity", "importing", "sources", "hub", "report", "record", "configfile", "client", "unit", "workers", "regularfile", "installation"),
    4: ("quantize", "evaluate", "supervisor", "status", "jobs", "library", "repair", "airgap", "inventory", "delivery", "verdict", "node", "front", "board", "provision", "bundle", "checkup", "tune"),
    5: ("cli",),
}
EDGE_B = ("vllm_plugin", "kernels", "worker", "gauge")
EDGE_B_MAY = ("errors", "quantize.format", "prepared", "pieces", "report", "importing", "kernels", "vllm_plugin", "worker", "gauge")
PURE_MAY_NOT = {"os", "subprocess", "socket", "time", "pathlib", "shutil", "tempfile", "threading", "random", "psutil"}
HEAVY = {"torch", "vllm", "numpy", "transformers", "safetensors", "gguf", "tokenizers", "huggingface_hub", "httpx2", "pydantic", "asyncio", "aiohttp"}
FRONT_MAY = {"asyncio", "aiohttp"}
"""The front door is their only user, and is imported in functions only, where the agent starts: they cost 15 MB."""
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


def layer_of(module: str) -> int | None:
    best: tuple[int, int] | None = None
    for layer, names in LAYERS.items():
        for name in names:
            if (module == name or module.startswith(name + ".")) and (best is None or len(name) > best[0]):
                best = len(name), layer
    return best[1] if best else None


def imports(path: Path, *, top_level_only: bool) -> set[str]:
    """Absolute names of everything imported; with `top_level_only` what runs when the module is imported."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and top_level_only:
                continue
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            if isinstance(child, ast.Import):
                found.update(alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module:
                found.add(child.module)
                found.update(f"{child.module}.{alias.name}" for alias in child.names)
            visit(child)

    visit(tree)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: module_of(p) or "appliance")
def test_imports_point_downwards(path: Path) -> None:
    module = module_of(path)
    if not module:
        return
    edge_b = module.split(".")[0] in EDGE_B
    layer = layer_of(module)
    assert edge_b or layer is not None, f"appliance.{module} belongs to no layer: add it to LAYERS"
    for name in imports(path, top_level_only=False):
        if not name.startswith("appliance."):
            continue
        target = name.removeprefix("appliance.")
        if edge_b:
            allowed = any(target == may or target.startswith(may + ".") for may in EDGE_B_MAY) or target == "__version__"
            assert allowed or target == "quantize", f"{module} may not import appliance.{target}"
            continue
        assert target.split(".")[0] not in EDGE_B, f"{module} may not import appliance.{target}"
        target_layer = layer_of(target)
        if target_layer is not None:
            assert target_layer <= layer, f"{module} (layer {layer}) imports appliance.{target} (layer {target_layer})"


@pytest.mark.parametrize("path", [p for p in FILES if layer_of(module_of(p)) in (1, 2)], ids=module_of)
def test_words_and_decisions_touch_nothing(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path, top_level_only=False)}
    assert not roots & (PURE_MAY_NOT | HEAVY)
    calls = {n.func.id for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert "open" not in calls


@pytest.mark.parametrize("path", [p for p in FILES if module_of(p).split(".")[0] not in EDGE_B], ids=lambda p: module_of(p) or "appliance")
def test_heavy_libraries_are_imported_in_functions_only(path: Path) -> None:
    names = imports(path, top_level_only=True)
    front = module_of(path).split(".")[0] == "front"
    assert not {name.split(".")[0] for name in names} & (HEAVY - FRONT_MAY if front else HEAVY)
    assert front or not any(name.startswith("appliance.front") for name in names)


def test_no_module_imports_itself_by_a_detour() -> None:
    names = {module_of(path) for path in FILES}
    edges = {
        module_of(path): {t for n in imports(path, top_level_only=True) if (t := n.removeprefix("appliance.")) in names and t != module_of(path)}
        for path in FILES
    }
    done: set[str] = set()

    def walk(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            for target in sorted(edges[module] - {""}):
                walk(target, (*trail, module))
            done.add(module)

    for module in sorted(names):
        walk(module, ())


def test_only_the_edge_knows_the_command_line() -> None:
    for path in FILES:
        if not module_of(path).startswith("cli"):
            assert "click" not in {name.split(".")[0] for name in imports(path, top_level_only=False)}, path


@pytest.mark.parametrize("path", FILES, ids=lambda p: module_of(p) or "appliance")
def test_modules_stay_readable(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    assert path.stem not in ("utils", "util", "common", "helpers", "helper", "misc")
    text = path.read_text()
    assert path.stat().st_size == 0 or ast.get_docstring(ast.parse(text)), "a module says what it does"
