"""Models on a stick: one file with a stored model, written on one node and taken in on another without a network."""
