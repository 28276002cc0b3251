"""Ways of saving memory compared with this project: what `benchmarks/peers.py` measures, judges, prints and draws.

`methods` are the ways of running a step, `measuring` runs them on one network, `rows` is what was found for each, `verdict`
what of this project's promises holds, and `tables` and `picture` show it.
"""
