"""Whether the torch that runs is one that the package knows: the releases, and the list of private names that it uses.

On a release that the package was not run with, or one where a name is gone, nothing is captured: nobody has seen what
torch does there with what is replaced in it, and exact bits come before memory. All else works: graphs are planned from
files, and training runs as it would without this package.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NoReturn

import torch

from lightning_remat._version import __version__
from lightning_remat.errors import CaptureError, listed

RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")
"""Releases of torch that the package was run with."""

NAMES = {
    "torch": "_assert _assert_async",
    "torch._C": "DisableTorchFunction DisableTorchFunctionSubclass DispatchKey.AutocastCPU DispatchKey.Autograd "
    "DispatchKey.CPU DispatchKey.CompositeImplicitAutograd DispatchKeySet TensorBase _AutoDispatchBelowAutograd "
    "_DisableAutocast _EnableTorchFunction _FunctionBase _VariableFunctions _accelerator_setAllocatorSettings "
    "_autograd._get_current_graph_task_keep_graph _autograd._get_sequence_nr _autograd._saved_tensors_hooks_set_tracing "
    "_current_autograd_node _current_graph_task_id _disabled_torch_function_impl _dispatch_has_kernel_for_dispatch_key "
    "_dispatch_tls_is_dispatch_key_excluded _functorch._grad_increment_nesting "
    "_functorch._jvp_increment_nesting _functorch.is_batchedtensor "
    "_functorch.is_legacy_batchedtensor _functorch.peek_interpreter_stack _get_sdp_priority_order "
    "_is_torch_function_enabled _nn _storage_Use_Count _vmapmode_decrement_nesting "
    "_vmapmode_increment_nesting _will_engine_execute_node _set_grad_enabled",
    "torch._decomp": "",
    "torch._dynamo": "maybe_mark_dynamic optimize",
    "torch._dynamo.backends.common": "aot_autograd",
    "torch._dynamo.bytecode_transformation": "create_call_function",
    "torch._dynamo.config": "accumulated_recompile_limit allow_rnn assume_static_by_default disable "
    "enable_dynamo_decompositions error_on_recompile optimize_ddp patch recompile_limit suppress_errors "
    "trace_autograd_ops trace_numpy",
    "torch._dynamo.convert_frame": "compile_lock",
    "torch._dynamo.eval_frame": "OptimizedModule _stance.stance",
    "torch._dynamo.exc": "RestartAnalysis TensorifyScalarRestartAnalysis TorchDynamoException unimplemented",
    "torch._dynamo.external_utils": "is_compiling",
    "torch._dynamo.guards": "CheckFunctionManager.build_guards GuardBuilder.CONSTANT_MATCH GuardBuilder.ID_MATCH "
    "GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT GuardBuilder.get_guard_manager_from_source _get_closure_vars install_guard",
    "torch._dynamo.side_effects": "SideEffects.mutation SideEffects.store_attr",
    "torch._dynamo.source": "AttrSource ConstantSource GlobalSource TensorProperty.SIZE TensorPropertySource",
    "torch._dynamo.symbolic_convert": "InstructionTranslator.current_tx InstructionTranslatorBase._format_value "
    "InstructionTranslatorBase.dispatch_table InstructionTranslatorBase.jump "
    "InstructionTranslatorBase.maybe_has_backedge TensorifyState.clear "
    "TensorifyState.should_specialize TensorifyState.specialize compare_op_handlers",
    "torch._dynamo.trace_rules": "check",
    "torch._dynamo.types": "ConvertFrameReturn FrameAction.SKIP FrameExecStrategy",
    "torch._dynamo.utils": "counters get_fake_value get_compilation_metrics guard_failures proxy_args_kwargs warn_once",
    "torch._dynamo.variables.base": "AttributeMutationExisting ValueMutationExisting VariableTracker._nonvar_fields "
    "VariableTracker.build VariableTracker.visit",
    "torch._dynamo.variables.builder": "TrackedFake VariableBuilder.__call__ VariableBuilder._wrap "
    "VariableBuilder._type_dispatch VariableBuilder.wrap_numpy_ndarray "
    "VariableBuilder.wrap_symfloat VariableBuilder.wrap_symint is_int_specialization_case wrap_fx_proxy",
    "torch._dynamo.variables.builtin": "BuiltinVariable.call_function",
    "torch._dynamo.variables.constant": "ConstantVariable.create",
    "torch._dynamo.variables.ctx_manager": "GradModeVariable._call_func",
    "torch._dynamo.variables.dicts": "ConstDictVariable",
    "torch._dynamo.variables.functions": "SkipFunctionVariable.call_function UserFunctionVariable "
    "WrapperUserFunctionVariable.call_function",
    "torch._dynamo.variables.lazy": "LazyVariableTracker.is_realized LazyVariableTracker.peek_value",
    "torch._dynamo.variables.lists": "BaseListVariable TupleVariable",
    "torch._dynamo.variables.misc": "AutogradFunctionVariable.call_apply "
    "GetAttrVariable LoggingLoggerVariable RandomVariable.call_method call_random_fn "
    "NumpyVariable.call_function StringFormatVariable.create StringFormatVariable.python_type",
    "torch._dynamo.variables.nn_module": "UnspecializedNNModuleVariable.call_function",
    "torch._dynamo.variables.optimizer": "OptimizerVariable._set_capturable",
    "torch._dynamo.variables.tensor": "SymNodeVariable SymNodeVariable.as_tensor "
    "TensorVariable.method___setitem__ TensorVariable.set_name_hint",
    "torch._dynamo.variables.torch": "TorchInGraphFunctionVariable._get_handlers TorchInGraphFunctionVariable.call_function",
    "torch._dynamo.variables.user_defined": "UserDefinedObjectVariable "
    "UserDefinedObjectVariable.method_setattr_standard call_random_fn",
    "torch._functorch._aot_autograd.descriptors": "GradAOTOutput InputMutationAOTOutput IntermediateBaseAOTOutput "
    "ParamAOTInput PlainAOTInput PlainAOTOutput SubclassGetAttrAOTInput SubclassGetAttrAOTOutput",
    "torch._functorch._aot_autograd.graph_compile": "tensorify_python_scalars",
    "torch._functorch._aot_autograd.runtime_wrappers": "_FirstInvocationContext.__init__",
    "torch._functorch._aot_autograd.schemas": "MemoryFormatMeta PlainTensorMeta "
    "OutputType.alias_of_intermediate_base_is_user_output",
    "torch._functorch.aot_autograd": "run_functionalized_fw_and_collect_metadata",
    "torch._functorch.config": "donated_buffer patch",
    "torch._functorch.pyfunctorch": "temporarily_clear_interpreter_stack",
    "torch._guards": "Guard GuardsSet.add Source TracingContext.get tracing",
    "torch._inductor.config": "fallback_random patch",
    "torch._ops": "HigherOrderOperator OpOverload",
    "torch._refs": "",
    "torch._subclasses.fake_tensor": "FakeTensor FakeTensorMode._dispatch_impl FakeTensorMode.cache_clear "
    "FakeTensorMode.dispatch",
    "torch._subclasses.functional_tensor": "FunctionalTensor FunctionalTensor.replace_ "
    "FunctionalTensorMode.__torch_dispatch__",
    "torch._utils": "is_compiling",
    "torch.Tensor": "_backward_hooks _base _indices _is_view _post_accumulate_grad_hooks _values _version",
    "torch.UntypedStorage": "_cdata",
    "torch.amp.autocast_mode": "_enter_autocast _exit_autocast",
    "torch.autograd": "_profiler_enabled",
    "torch.autograd.grad_mode": "_enter_inference_mode _exit_inference_mode",
    "torch.autograd.graph": "Node._sequence_nr _engine_run_backward",
    "torch.autograd.Variable": "_execution_engine",
    "torch.distributed.distributed_c10d": "_get_default_store",
    "torch.distributions.kl": "_KL_MEMOIZE _KL_REGISTRY _dispatch_kl",
    "torch.fx.Node": "_rename",
    "torch.fx._lazy_graph_module": "_LazyGraphModule",
    "torch.fx.experimental._config": "patch use_duck_shape",
    "torch.nn.modules.loss": "_Loss",
    "torch.ops.aten": "_adaptive_avg_pool2d_backward.default _adaptive_avg_pool3d_backward.default _assert_async.msg "
    "_batch_norm_with_update.default _batch_norm_with_update_functional.default _foreach_pow.Scalar _foreach_pow_.Scalar "
    "_functional_assert_async.msg "
    "_functional_assert_scalar.default _functional_sym_constrain_range.default "
    "_functional_sym_constrain_range_for_size.default _grouped_mm.default _linalg_eigh.default "
    "_linalg_eigvals.default _linalg_svd.default _log_softmax.default "
    "_log_softmax.out _log_softmax_backward_data.default _log_softmax_backward_data.out "
    "_native_batch_norm_legit.default _native_batch_norm_legit.no_stats "
    "_native_batch_norm_legit_functional.default _native_batch_norm_legit_no_training.default "
    "_pack_padded_sequence_backward.default _safe_softmax.default _softmax.default "
    "_softmax_backward_data.default _to_copy.default _trilinear.default _unsafe_index_put.default _unsafe_view.default "
    "add.Tensor._dispatch_cache add.Tensor._op add.Tensor._op_dk add.Tensor._schema add.Tensor.py_kernels",
    "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes",
    "torch.utils._pytree": "tree_flatten tree_leaves tree_map tree_map_only tree_unflatten",
    "torch.utils._sympy.interp": "sympy_interp",
    "torch.utils._sympy.numbers": "int_oo",
    "torch.utils._sympy.reference": "PythonReferenceAnalysis",
    "torch.utils._sympy.symbol": "SymT.FLOAT symbol_is_type",
}
"""The private names of torch that are used, by the module or object that has them; ``add`` stands for any op."""

LATER_NAMES = {
    "torch._C._distributed_c10d": "Reducer._delay_all_reduce",
    "torch._C._dynamo": "guards.TensorGuards guards.dict_version guards.install_no_tensor_aliasing_guard",
    "torch": "_from_functional_tensor _functionalize_unsafe_set _to_functional_tensor",
    "torch.Tensor": "_is_zerotensor",
    "torch._dynamo.guards": "profile_guard_manager",
    "torch._dynamo.symbolic_convert": "get_funcname",
    "torch.distributed.fsdp": "FSDPModule._get_fsdp_state",
    "torch._inductor.async_compile": "AsyncCompile.wait",
    "torch._inductor.compile_fx": "compile_fx_inner",
    "torch._inductor.decomposition": "select_decomp_table",
}
"""Likewise, names without which it goes on: ops are not fused then (these are imported there, since that takes long), or each
is traced, those that come again as well, or Dynamo reads more files, or sharded networks run as before, or the first backward
of a static graph is not repeated, or all guards are asked before each step, or are timed."""


def missing() -> list[str]:
    """The private names that the torch that runs does not have; below one that is gone, none is looked for."""
    found: dict[str, None] = {}
    for place, names in NAMES.items():
        try:
            home = _found(place)
        except (ImportError, AttributeError):
            found[place] = None
            continue
        for name in names.split():
            path, owner = place, home
            for part in name.split("."):
                path = f"{path}.{part}"
                if not hasattr(owner, part):
                    found[path] = None
                    break
                owner = getattr(owner, part)
    return list(found)


def _found(place: str) -> Any:
    """A module, or what lies in one."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError:
        home, _, name = place.rpartition(".")
        if not home:
            raise
        return getattr(_found(home), name)


@functools.cache
def unknown_torch() -> str:
    """Why nothing is captured on the torch that runs, and what to do; "" on one that is known."""
    release, gone, why = ".".join(torch.__version__.split(".")[:2]), missing(), []
    if release not in RELEASES:
        why.append("it was not run with that release")
    if gone:
        why.append(f"what it uses of torch's internals is gone there ({listed(gone)})")
    if not why:
        return ""
    return (
        f"nothing can be planned on torch {torch.__version__}, and training runs as it would without lightning_remat "
        f"{__version__}: {', and '.join(why)}. It was run with torch {', '.join(RELEASES[:-1])} and "
        f"{RELEASES[-1]}: install one of these, or a newer lightning_remat"
    )


class Unavailable:
    """Stands for a name that is not there on a torch that is not known: any use of it raises ``CaptureError``."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CaptureError(self._reason)

    def __call__(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise CaptureError(self._reason)
