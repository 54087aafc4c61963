"""A source as the normal form, whatever it is: the one place that knows which importer reads which kind."""

from __future__ import annotations

from appliance.importing.source import Source
from appliance.importing.tensors import NormalForm


def open_source(source: Source) -> NormalForm:
    """Read the headers of an inspected GGUF file or folder. Raises ModelError as `inspect` does."""
    if source.kind == "gguf":
        from appliance.importing.gguf import open_gguf

        return open_gguf(source)
    from appliance.importing.folder import open_folder

    return open_folder(source)
