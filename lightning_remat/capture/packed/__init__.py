"""Packed sequences (``torch.nn.utils.rnn``): packing, recurrent layers over them, and padding, each as one op.

Eager's kernel of such a layer is a loop in C++ over ``batch_sizes``, which says how many sequences go on at each time. It
differs from batch to batch, and a graph of the loop's own ops would hold for one batch alone. So the loop is one op, its
backward another one, and what autograd keeps between the two is a tensor, which a schedule keeps or makes again.

* ``_tracing`` has Dynamo trace ``_stand_ins`` for torch's functions. ``batch_sizes`` is found before the step, and is an
  input of the graph; so is how many rows are packed, as the size of an empty tensor. Dropout between layers is the
  graph's own.
* ``_ops`` has the ops. What the backward of a layer needs is on its ``_tape``.
* ``_joint`` calls functions in the place of the ops, and adds to gradients in eager's order.
* ``_made_up`` has the batch sizes that an op is timed with.
"""
