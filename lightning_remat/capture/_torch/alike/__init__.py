"""A deep network is traced once for all of its blocks that are alike: the graph is the one that would have been traced.

* ``_calls`` copies what Dynamo makes of a module's call where another module is called that is alike: ``_reads`` says what
  was read, ``_trace`` what else was noted, and ``_copies`` puts it together again.
* ``_ops`` copies what AOTAutograd makes of ops that are alike, and ``_early`` does so in its first run, which makes no graph.
  ``_keys`` says by what an op is known again.
"""
