"""Models of the Hugging Face Hub as sources: names, which files are needed, and fetching them.

`reference` and `selection` decide (pure), `access` says how this node reaches the Hub, `orders` are what the child is
told. The rest runs in the child, `python -m appliance.hub`, with the worker's Python, where `huggingface_hub` is: it
does the protocol. Rules: a revision is pinned to its commit before anything else; nothing that can run code is ever
fetched; every file is compared with the checksum that the Hub's listing gives.
"""
