"""What is replaced in Dynamo while it traces a step, so that it captures what it would leave to Python, or traces otherwise.

* Answered while the step is captured: ``_buffers`` that are assigned, ``_constants``, ``_numpy`` on plain numbers, and what
  is asked of ``_masks``.
* Computed before the step, as the graph or its sizes depend on values (``_early``): ``_answers`` to what Python asks of them,
  and the ``_rows`` that a mask chooses. How they are computed is read from the graph so far (``_values``).
* Done while the step is captured, as eager mode does in its first call: hooks are installed (``_recorded_outputs``).
* Run as eager mode runs them: what the user has ``_compiled``, hooks in their order (``_hook_order``), ``_messages``.
* Differentiated as eager mode does: backwards of ``autograd.Function`` (``_functions``).
* Captured as the absence of gradients, or refused on releases of torch that cannot capture it: ``_inference`` mode.

Each has a context in which it holds; `runtime` enters them around a capture.
"""
