"""AOTAutograd, as it traces a captured forward with its backward, and what is set in torch meanwhile.

* ``aot_autograd`` with ``partition_fn``: it hands over the joint forward-backward graph, and runs what it gets back.
* ``_inductor.config.fallback_random``: without it, AOTAutograd drops random ops whose result nobody reads; eager draws them.
  What else it does not drop is in ``_fast_nodes`` (see ``capture._effects``).
* ``_functorch.config``: what it does besides (see `Frame`).
* ``_FirstInvocationContext``: its look at each op of a first run (see `_unwatched`).
* ``_EnableTorchFunction``: steps that are given tensors of a subclass (see `_of_plain_tensors`).
* ``run_functionalized_fw_and_collect_metadata``: where it decides which layouts the tangents have (see
  `_tangents_lie`) and how outputs that are views are made (see `_detached_views`), and ``TracingContext``, where its notes
  on tangents are found (see ``_exchange``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch import aot_autograd as functorch_aot
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import runtime_wrappers
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext
from torch._inductor import config as inductor_config
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from lightning_remat._replaced import replaced
from lightning_remat.capture._regions import inline_regions
from lightning_remat.capture._tangents import Layouts
from lightning_remat.capture._torch._decompositions import whole_ops
from lightning_remat.capture._torch._descriptors import output_of
from lightning_remat.capture._torch._exchange import Exchange
from lightning_remat.capture._torch._fake import real_layouts, spaced_results
from lightning_remat.capture._torch._fast_nodes import nodes_made_fast, unread_ops_stay
from lightning_remat.capture._torch._loggers import unprinted
from lightning_remat.capture._torch._midway import set_back, sets_more
from lightning_remat.capture._torch._numbers import floats_stay
from lightning_remat.capture._torch._running import Modules, boxed, unwritten
from lightning_remat.capture._torch._tracing import tracing
from lightning_remat.capture._torch.alike._ops import alike_ops

Partition = Callable[..., Modules]


class Frame:
    """A graph that Dynamo has captured, to be traced by AOTAutograd, and once more for tangents of another layout.

    Args:
        module: the captured forward; its regions are inlined in place.
        parts: ops that are captured as the ops that they are made of, each with a function that calls these.
        symbolic: whether sizes are symbols.
        stays: tells of an op's target whether the op must stay although nobody reads its results.

    Attributes:
        module: the captured forward.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        parts: Mapping[OpOverload, Callable[..., Any]],
        symbolic: bool,
        stays: Callable[[Any], bool],
    ) -> None:
        inline_regions(module)
        self.module = module
        self._parts, self._symbolic, self._stays = parts, symbolic, stays
        self._copies = not symbolic and not sets_more(module)
        placeholders = module.graph.find_nodes(op="placeholder")
        self._examples = [node.meta.get("example_value") for node in placeholders]  # Dynamo clears the nodes
        kinds = ("cpu", "cuda")
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._autocast_cache = torch.is_autocast_cache_enabled()

    def compiled(self, example_inputs: Sequence[Any], partition: Partition) -> tuple[Callable[..., Any], Exchange]:
        """Run AOTAutograd; ``partition`` turns the joint graph into a forward and a backward module.

        Returns:
            What runs the graph, differentiable as a single node of autograd's graph, and the exchange by which other
            versions of the two modules are run in their place.
        """
        exchange = Exchange()
        waiting = [partition]  # to be let go of: it holds the step's inputs, and torch 2.11 keeps `partitioned`
        unknown = [False]

        def partitioned(*args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
            modules = waiting.pop()(*args, **kwargs)
            exchange.add(modules)
            exchange.summands = modules.summands
            unknown[0] = any(_is_of_others(node.target) for node in modules.forward.graph.nodes)
            backward: Any = _with_gradients_alone(modules.backward, exchange.summands)
            backward.__deepcopy__ = lambda _memo: backward  # AOTAutograd copies what `compiler` makes nothing of
            return modules.forward, backward

        def inference(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            return boxed(module)

        def compiler(run: Callable[[list[Any]], Any]) -> Callable[..., Callable[[list[Any]], Any]]:
            def compiled(_module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
                if run == exchange.forward:
                    exchange.noted_by(TracingContext.get().fw_metadata)

                def call(args: list[Any]) -> Any:
                    return run(args)

                call._boxed_call = True  # type: ignore[attr-defined]
                return call

            return compiled

        backend = aot_autograd(
            fw_compiler=compiler(exchange.forward),
            bw_compiler=compiler(exchange.backward),
            inference_compiler=inference,
            partition_fn=partitioned,
            decompositions=dict(self._parts),
        )
        with _unwatched(lambda: unknown[0]):
            compiled: Callable[..., Any] = self._traced(backend, example_inputs, lambda: not waiting)
        waiting.clear()
        TensorifyState.clear()  # the floats for which Dynamo began again are constants of what is now captured
        return _of_plain_tensors(compiled), exchange

    def joint(self, layouts: Layouts, read: Callable[..., Any]) -> Any:
        """Trace the joint graph for tangents with these layouts, compile nothing, and return what ``read`` makes of it.

        ``read`` is called as ``partition_fn`` is. It may be used in a backward: gradients are enabled for it, and
        autocast is set as when the graph was captured.
        """
        found: list[Any] = []

        def partitioned(*args: Any, **kwargs: Any) -> Any:
            found.append(read(*args, **kwargs))
            raise _Traced

        def never(_module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
            raise RuntimeError("no gradient of it is needed")

        backend = aot_autograd(
            fw_compiler=never, bw_compiler=never, partition_fn=partitioned, decompositions=dict(self._parts)
        )
        with contextlib.ExitStack() as stack:
            stack.enter_context(compile_lock)
            stack.enter_context(self.around())
            stack.enter_context(tracing())
            stack.enter_context(_tangents_lie(layouts))
            with contextlib.suppress(_Traced):
                self._traced(backend, self._examples, lambda: bool(found))
        return found[0]

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Gradients are enabled meanwhile, and autocast is set as when the graph was captured."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    around = torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._autocast_cache)
                    stack.enter_context(around)
            yield

    def _traced(self, backend: Callable[..., Any], inputs: Sequence[Any], handed_over: Callable[[], bool]) -> Any:
        """What AOTAutograd makes of the module: ops that are alike are traced once, or each anew where that fails.

        Args:
            backend: AOTAutograd.
            inputs: example arguments.
            handed_over: tells whether it has handed over the joint graph: what fails then is another's, and is raised.
        """
        if self._copies:
            try:
                with self._settings(), set_back(), alike_ops(handed_over, self._parts):
                    return backend(self.module, inputs)
            except Exception:  # an op in place that comes late, or a torch in which something is otherwise
                if handed_over():
                    raise
        with self._settings():
            return backend(self.module, inputs)

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """All that is set or replaced in torch while AOTAutograd traces."""
        settings: dict[str, Any] = {"donated_buffer": False}
        if hasattr(functorch_config, "backward_pass_autocast"):
            # "same_as_forward" gives other bits than eager where the step has a region with autocast off.
            settings["backward_pass_autocast"] = "off"
        with (
            whole_ops(self._symbolic),
            floats_stay(),
            real_layouts(),
            spaced_results(),
            _noted(_detached_views),
            unread_ops_stay(self._stays),
            nodes_made_fast(self._symbolic),
            unprinted(),
            functorch_config.patch(settings),
            inductor_config.patch(fallback_random=True),
            warnings.catch_warnings(),
        ):
            # Where a trace fails, another is tried, or the reason is said: it is no fault of the user's.
            warnings.filterwarnings("ignore", message="Error detected in ")
            yield


_OF_TORCH = ("aten", "prim", "prims", "lightning_remat")


def _is_of_others(target: Any) -> bool:
    """Whether it is an operator of whose results AOTAutograd looks whether they are views, as the operator may not say."""
    return isinstance(target, OpOverload) and target.namespace not in _OF_TORCH


@contextlib.contextmanager
def _unwatched(watched: Callable[[], bool]) -> Iterator[None]:
    """AOTAutograd looks at each op of the first run of what it makes meanwhile where ``watched`` says so, and never else.

    The look is for operators that are none of torch's.
    """

    def made(context: runtime_wrappers._FirstInvocationContext) -> None:
        context._is_first = watched()

    with replaced([(runtime_wrappers._FirstInvocationContext, "__init__", made)]):
        yield


class _Traced(BaseException):
    """Ends AOTAutograd once it has handed over the joint graph."""


@contextlib.contextmanager
def _noted(change: Callable[[Any], None]) -> Iterator[None]:
    """While open, AOTAutograd's notes on each graph are changed before it goes by them."""
    own = functorch_aot.run_functionalized_fw_and_collect_metadata  # type: ignore[attr-defined]

    def collecting(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        collect = own(*args, **kwargs)

        def collected(*inputs: Any) -> Any:
            metadata = collect(*inputs)
            change(metadata)
            return metadata

        return collected

    functorch_aot.run_functionalized_fw_and_collect_metadata = collecting  # type: ignore[attr-defined]
    try:
        yield
    finally:
        functorch_aot.run_functionalized_fw_and_collect_metadata = own  # type: ignore[attr-defined]


def _tangents_lie(layouts: Layouts) -> contextlib.AbstractContextManager[None]:
    """While open, AOTAutograd traces a backward for tangents with these layouts."""

    def change(metadata: Any) -> None:
        for i, description in enumerate(metadata.traced_tangents_descs):
            layout, tangent = layouts.get(output_of(description)), metadata.traced_tangents[i]  # type: ignore[arg-type]
            if layout is not None and isinstance(tangent, FakeTensor):
                with tangent.fake_mode:
                    metadata.traced_tangents[i] = layout.empty_like(tangent)

    return _noted(change)


def _detached_views(metadata: Any) -> None:
    """Have an output that is ``view.detach()``, beside the view itself, made of the view by its strides.

    Torch notes the views that lead from their base to it, and makes them once more, of the output that is the view already:
    ``h.t()`` would be turned back, and for ``h[:, 0]`` there is no such dimension left.
    """
    for i, output in enumerate(metadata.output_info):
        of_output = output.output_type is OutputType.alias_of_intermediate_base_is_user_output
        if of_output and not output.requires_grad:
            metadata.output_info[i] = dataclasses.replace(output, view_meta_sequence=None)


def _with_gradients_alone(backward: torch.fx.GraphModule, summands: int) -> torch.fx.GraphModule:
    """A backward without its outputs for summands, for AOTAutograd, which counts them. (`Exchange.backward` is run.)"""
    if not summands:
        return backward
    graph = torch.fx.Graph()
    outputs: Any = graph.graph_copy(backward.graph, {})
    graph.output(tuple(outputs[: len(outputs) - summands]))
    return unwritten(backward, graph)


def _of_plain_tensors(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Runs it on plain tensors where it is given some of a subclass, whose own functions Dynamo has traced.

    AOTAutograd's look at each op refuses tensors of subclasses, and `_exchange._Written` rests on ``__torch_function__``, which
    Dynamo turns off meanwhile.
    """
    places: list[Sequence[int]] = []  # of such tensors, once they are known: Dynamo guards on types

    def run(*args: Any) -> Any:
        if not places:
            places.append([i for i, one in enumerate(args) if _has_own_functions(one)])
        if not places[0] and torch._C._is_torch_function_enabled():
            return compiled(*args)
        given = list(args)
        with torch._C.DisableTorchFunctionSubclass():
            for i in places[0]:
                given[i] = given[i].as_subclass(torch.Tensor)
        with torch._C._EnableTorchFunction():
            return compiled(*given)

    return run


def _has_own_functions(value: Any) -> bool:
    """Whether it is a tensor of a subclass that has functions of its own, and no ops."""
    kind = type(value)
    if not isinstance(value, torch.Tensor) or kind.__torch_function__ is torch._C._disabled_torch_function_impl:
        return False
    return kind is not torch.Tensor and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
