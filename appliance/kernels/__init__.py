"""Int4 kernels: the registry that chooses one per layer, the native and torch's own kernel, the slow obvious
reference."""

NAMES = ("native", "aten", "portable")
"""The kernels of this build, the preferred one first; read without importing torch."""
