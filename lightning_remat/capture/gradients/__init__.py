"""Gradients leave a captured graph as they leave eager mode's: added up in its order, on its memory, when it has them.

* ``_sums`` of tensors that later code reads too, ``_ports`` of views, ``_autocast``'s weights, which are cast once.
* ``_order`` in which eager mode has them, for several processes; they leave in ``_stages``, and which are ``_taken`` is kept.
* ``_shared`` are those that two parameters have together.
* They are ``_differentiated`` again outside, where a backward asks for it: a ``_pass`` is one such backward.
"""
