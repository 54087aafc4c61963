"""Int4 kernels: the registry that chooses one per layer, torch's own kernel, and the slow obvious reference."""

NAMES = ("native", "aten", "portable")
"""The kernels of this build, the preferred one first; read without importing torch."""
