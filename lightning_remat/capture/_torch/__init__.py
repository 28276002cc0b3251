"""Every private name of torch that the project uses, one file for each of torch's subsystems, and what is made of them.

``_versions`` lists all the names and the releases of torch that were tried, and looks the names up before any is
imported; on a torch that is not known, none is.
"""

from typing import TYPE_CHECKING

from lightning_remat.capture._torch._versions import Unavailable, unknown_torch

if TYPE_CHECKING or not unknown_torch():
    # As torch has them.
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.source import AttrSource
    from torch._dynamo.utils import counters as dynamo_counters
    from torch._guards import Source
    from torch._ops import HigherOrderOperator, OpOverload
    from torch._subclasses.fake_tensor import FakeTensor

    from lightning_remat.capture._torch._allocator import allocator_settings, set_allocator_settings
    from lightning_remat.capture._torch._aot import Frame
    from lightning_remat.capture._torch._autocast import (
        as_autocast_is,
        autocast_region,
        enter_autocast,
        enter_inference_mode,
        exit_autocast,
        exit_inference_mode,
        set_grad_enabled,
    )
    from lightning_remat.capture._torch._autograd_graph import (
        accumulates_into,
        adds_to,
        backward_number,
        captured_node,
        graph_is_kept,
        in_backward,
        is_to_run,
        keep_saved,
        lead_only_to,
        needs_kept,
        on_backward,
        sources_of_gradients,
    )
    from lightning_remat.capture._torch._compiled import COMPILED_CALL, DISABLED, INLINED, ORIGINAL, OptimizedModule
    from lightning_remat.capture._torch._cuda_graphs import CudaTapes, clear_workspaces, holders, random_source
    from lightning_remat.capture._torch._decompositions import calls_cudnn, whole_ops
    from lightning_remat.capture._torch._descriptors import (
        argument_of,
        is_parameter,
        output_described,
        output_of_tangent,
        overwritten,
        runs_in_forward,
    )
    from lightning_remat.capture._torch._dispatch import observed_ops, run_below_autograd, run_on_cpu
    from lightning_remat.capture._torch._distributed import default_store, processes
    from lightning_remat.capture._torch._effects import FUNCTIONALIZED, PRINT, WITH_EFFECTS, assert_async
    from lightning_remat.capture._torch._exchange import Exchange
    from lightning_remat.capture._torch._fake import (
        fake_tensors,
        real_layouts,
        real_tensors,
        spaced_results,
        with_fakes,
        without_functions_of_ones_own,
    )
    from lightning_remat.capture._torch._frames import (
        Uncaptured,
        capture_failures,
        code_of,
        codes_of_torch,
        compile_frame,
        ends_function,
        goes_on,
        is_code_of,
        is_part_of,
        is_whole_function,
        recapture_reason,
        skip_no_more,
        turned_off,
        varying,
    )
    from lightning_remat.capture._torch._guards import (
        absent,
        found_at,
        given,
        given_now,
        guard_on,
        guard_on_choices,
        guard_on_gradients,
        source_name,
    )
    from lightning_remat.capture._torch._handlers import DIFFERENTIATE, GRAD_MODE, INLINED_FUNCTION, replaced_handlers
    from lightning_remat.capture._torch._inductor import Compiled, Uncompiled, cast, compile_all
    from lightning_remat.capture._torch._jumps import jumps_decided
    from lightning_remat.capture._torch._late_reduction import reduce_after
    from lightning_remat.capture._torch._lines import hand_out
    from lightning_remat.capture._torch._loggers import logging_calls
    from lightning_remat.capture._torch._module_guards import ModuleGuards
    from lightning_remat.capture._torch._number_functions import called_with, holds, is_number, varies
    from lightning_remat.capture._torch._numbers import (
        VaryingNumbers,
        build_number,
        floats_as_constants,
        integers,
        is_size_of_tensor,
        know_sizes,
        sizes_from_floats,
        trace_again,
    )
    from lightning_remat.capture._torch._profiler import (
        allocations,
        marked,
        profilers_counting,
        profiling,
        profiling_anywhere,
    )
    from lightning_remat.capture._torch._running import Arrival, Modules, boxed, unwritten
    from lightning_remat.capture._torch._symbols import computed, expression, free_symbols, hint, largest, substitute
    from lightning_remat.capture._torch._tensors import address_of, changed_since, copied, tensor_leaves
    from lightning_remat.capture._torch._tracing import collected, tracing, uncollected
    from lightning_remat.capture._torch._units import UnitCalls, as_returned, is_distributed, shards_of, unit_of
    from lightning_remat.capture._torch._variables import (
        BaseListVariable,
        BuiltinVariable,
        GetAttrVariable,
        IgnoredFunctionVariable,
        LazyVariableTracker,
        LoggingLoggerVariable,
        NumpyVariable,
        SetAttrVariable,
        SkipFunctionVariable,
        StringFormatVariable,
        SymNodeVariable,
        TensorVariable,
        TorchInGraphFunctionVariable,
        TupleVariable,
        UnspecializedNNModuleVariable,
        UserFunctionVariable,
        VariableBuilder,
        VariableTracker,
        attribute_of,
        build_attribute,
        compare_handlers,
        is_size,
        reconstruct_as,
        reconstruct_copy,
    )
    from lightning_remat.capture._torch.alike._calls import alike_modules

__all__ = [
    "COMPILED_CALL",
    "DIFFERENTIATE",
    "DISABLED",
    "FUNCTIONALIZED",
    "GRAD_MODE",
    "INLINED",
    "INLINED_FUNCTION",
    "ORIGINAL",
    "PRINT",
    "WITH_EFFECTS",
    "Arrival",
    "AttrSource",
    "BaseListVariable",
    "BuiltinVariable",
    "Compiled",
    "CudaTapes",
    "Exchange",
    "FakeTensor",
    "Frame",
    "GetAttrVariable",
    "HigherOrderOperator",
    "IgnoredFunctionVariable",
    "LazyVariableTracker",
    "LoggingLoggerVariable",
    "ModuleGuards",
    "Modules",
    "NumpyVariable",
    "OpOverload",
    "OptimizedModule",
    "SetAttrVariable",
    "SkipFunctionVariable",
    "Source",
    "StringFormatVariable",
    "SymNodeVariable",
    "TensorVariable",
    "TorchInGraphFunctionVariable",
    "TupleVariable",
    "Unavailable",
    "Uncaptured",
    "Uncompiled",
    "UnitCalls",
    "UnspecializedNNModuleVariable",
    "UserFunctionVariable",
    "VariableBuilder",
    "VariableTracker",
    "VaryingNumbers",
    "absent",
    "accumulates_into",
    "address_of",
    "adds_to",
    "alike_modules",
    "allocations",
    "allocator_settings",
    "argument_of",
    "as_autocast_is",
    "as_returned",
    "assert_async",
    "attribute_of",
    "autocast_region",
    "backward_number",
    "boxed",
    "build_attribute",
    "build_number",
    "called_with",
    "calls_cudnn",
    "capture_failures",
    "captured_node",
    "cast",
    "changed_since",
    "clear_workspaces",
    "code_of",
    "codes_of_torch",
    "collected",
    "compare_handlers",
    "compile_all",
    "compile_frame",
    "computed",
    "copied",
    "default_store",
    "dynamo_counters",
    "ends_function",
    "enter_autocast",
    "enter_inference_mode",
    "exit_autocast",
    "exit_inference_mode",
    "expression",
    "fake_tensors",
    "floats_as_constants",
    "found_at",
    "free_symbols",
    "given",
    "given_now",
    "goes_on",
    "graph_is_kept",
    "guard_on",
    "guard_on_choices",
    "guard_on_gradients",
    "hand_out",
    "hint",
    "holders",
    "holds",
    "in_backward",
    "integers",
    "is_code_of",
    "is_distributed",
    "is_number",
    "is_parameter",
    "is_part_of",
    "is_size",
    "is_size_of_tensor",
    "is_to_run",
    "is_whole_function",
    "jumps_decided",
    "keep_saved",
    "know_sizes",
    "largest",
    "lead_only_to",
    "logging_calls",
    "marked",
    "needs_kept",
    "observed_ops",
    "on_backward",
    "output_described",
    "output_of_tangent",
    "overwritten",
    "processes",
    "profilers_counting",
    "profiling",
    "profiling_anywhere",
    "random_source",
    "real_layouts",
    "real_tensors",
    "recapture_reason",
    "reconstruct_as",
    "reconstruct_copy",
    "reduce_after",
    "replaced_handlers",
    "run_below_autograd",
    "run_on_cpu",
    "runs_in_forward",
    "set_allocator_settings",
    "set_grad_enabled",
    "shards_of",
    "sizes_from_floats",
    "skip_no_more",
    "source_name",
    "sources_of_gradients",
    "spaced_results",
    "substitute",
    "tensor_leaves",
    "trace_again",
    "tracing",
    "turned_off",
    "uncollected",
    "unimplemented",
    "unit_of",
    "unknown_torch",
    "unwritten",
    "varies",
    "varying",
    "whole_ops",
    "with_fakes",
    "without_functions_of_ones_own",
]
