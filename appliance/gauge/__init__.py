"""What runs in a measuring child, with the worker's Python: memory, weights, the crash canary.

`python -m appliance.gauge ORDER`; `appliance.tune` gives the orders and reads the events. Rules: nothing is decided
here; each figure is told the moment it is known, so that a crash later on takes none of them away.
"""
