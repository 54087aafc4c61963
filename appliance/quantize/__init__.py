"""From a normal-form model folder to a `cpu_int4` checkpoint. Runs in the worker's environment."""
