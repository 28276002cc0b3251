// A CUDA device for torch's CPU build, with the host's memory and the CPU's kernels.
//
// Tensors on it have the dispatch key CUDA. Every op of ATen's that has a kernel for the CPU is run by that kernel, on tensors
// that share the memory of those that are given; what it returns is copied to the device, but for views and for what was given.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "cells.h"
#include "graphs.h"
#include "memory.h"

using namespace simulated;

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

// -- Streams and events: everything has ended when it returns ---------------------------------------------------------

thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> streams{0};

Stream stream_of(c10::StreamId id) {
  return Stream(Stream::UNSAFE, HERE, id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return HERE; }
  Device getDevice() const override { return HERE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Stream getStream(Device) const override { return stream_of(current_stream); }
  Stream getDefaultStream(Device) const override { return stream_of(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream_of(++streams); }
  Stream getNewStream(Device, int) const override { return stream_of(++streams); }
  Stream exchangeStream(Stream stream) const override {
    auto before = stream_of(current_stream);
    current_stream = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { wait("a stream is waited for"); }
  void synchronizeDevice(const DeviceIndex) const override { wait("the device is waited for"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    using namespace std::chrono;
    if (!*event) *event = new double;
    *static_cast<double*>(*event) = duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { wait("an event is waited for"); }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return *static_cast<double*>(second) - *static_cast<double*>(first);
  }
};

at::Tensor empty(c10::IntArrayRef sizes, c10::IntArrayRef strides, caffe2::TypeMeta dtype) {
  const size_t nbytes = at::detail::computeStorageNbytes(sizes, strides, dtype.itemsize());
  c10::Storage storage(c10::Storage::use_byte_size_t(), nbytes, memory.allocate(nbytes), &memory, /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return made;
}

struct CUDAHooks final : at::CUDAHooksInterface { // torch finds it by this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  int getNumGPUs() const override { return 1; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(DeviceType::CPU); }
  Device getDeviceFromPtr(void*) const override { return HERE; }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<Generator>(std::make_shared<RandomState>());
  }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return default_generator(); }
};

// -- Ops ------------------------------------------------------------------------------------------------------------

// A tensor of the CPU's in the memory of one on the device.
at::Tensor on_cpu(const at::Tensor& tensor) {
  void* address = const_cast<void*>(tensor.storage().data());
  c10::DataPtr data(address, address, [](void*) {}, Device(DeviceType::CPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetAllocator(DeviceType::CPU), true);
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

// Zeros that lie as a tensor does, in memory of their own: what is recorded has no values, and zero is an index of anything.
at::Tensor zeros_for(const at::Tensor& tensor) {
  const at::Tensor there = on_cpu(tensor);
  const int64_t nbytes = there.storage().nbytes();
  at::Tensor memory = at::detail::empty_cpu({nbytes}, at::kByte, {}, {}, {}, {});
  if (nbytes) memset(memory.mutable_data_ptr(), 0, nbytes);
  there.unsafeGetTensorImpl()->set_storage_keep_dtype(memory.storage());
  return there;
}

// Write what a dense tensor holds into another one's memory.
void write(const at::Tensor& made, const at::Tensor& values) {
  TORCH_CHECK(made.sizes() == values.sizes() && made.strides() == values.strides(), "it lies otherwise than recorded");
  if (made.numel()) memcpy(made.mutable_data_ptr(), values.const_data_ptr(), made.storage().nbytes());
}

struct Pair {
  at::Tensor own, cpu;
};

// A call of an op with tensors of the CPU's, in the memory of those that are given, or with zeros in their place.
struct Call {
  const c10::OperatorHandle& op;
  bool zeros = false;
  std::vector<Pair> pairs;
  std::vector<at::Tensor> made; // one for each tensor that is returned; undefined for views and for what was given
  std::shared_ptr<RandomState> state = state_of(default_generator());
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  bool mixes = op.operator_name().name == "aten::_to_copy" || op.operator_name().name.find("index") != std::string::npos;

  at::Tensor given(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(
          mixes || tensor.dim() == 0 || pairs.empty(),
          "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! (",
          op.operator_name(), ")");
      if (!recording) return tensor;
      at::Tensor kept = tensor.clone();
      kept.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      return kept;
    }
    for (const auto& pair : pairs) if (pair.own.is_same(tensor)) return pair.cpu;
    pairs.push_back({tensor, zeros ? zeros_for(tensor) : on_cpu(tensor)});
    return pairs.back().cpu;
  }

  c10::IValue given(const c10::IValue& value) {
    if (value.isTensor()) return given(value.toTensor());
    if (value.isTensorList()) {
      std::vector<at::Tensor> found;
      for (const at::Tensor& one : value.toTensorVector()) found.push_back(given(one));
      return found;
    }
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<at::Tensor>> found;
      for (const c10::IValue& one : value.toListRef()) {
        found.push_back(one.isNone() ? std::nullopt : std::make_optional(given(one.toTensor())));
      }
      return found;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return Device(DeviceType::CPU);
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      state = state_of(value.toGenerator());
      return c10::IValue();
    }
    draws = draws && !value.isGenerator();
    return value;
  }

  c10::IValue given(const c10::Argument& argument, const c10::IValue& value) {
    return argument.name() == "pin_memory" ? c10::IValue() : given(value);
  }

  // What an op has given another size or other memory (`out=`) is so on the device too.
  void resized() {
    for (const auto& [own, cpu] : pairs) {
      if (cpu.sizes() == own.sizes() && cpu.storage().data() == own.storage().data()) continue;
      becomes({own, cpu});
    }
  }

  void becomes(const Pair& pair) {
    const auto made = copied(pair.cpu);
    pair.own.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
    pair.own.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), 0);
  }

  at::Tensor copied(const at::Tensor& tensor) {
    auto made = empty(tensor.sizes(), tensor.strides(), tensor.dtype());
    if (!recording) write(made, tensor);
    made._set_conj(tensor.is_conj());
    made._set_neg(tensor.is_neg());
    return made;
  }

  at::Tensor taken(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    made.emplace_back();
    for (const auto& [own, cpu] : pairs) if (cpu.is_same(tensor)) return own;
    for (const auto& [own, cpu] : pairs) {
      if (!tensor.storage().data() || !cpu.storage().is_alias_of(tensor.storage())) continue;
      auto view = at::detail::make_tensor<c10::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(own.storage()), own.key_set(), tensor.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
      view._set_conj(tensor.is_conj());
      view._set_neg(tensor.is_neg());
      return view;
    }
    return made.back() = copied(tensor);
  }

  c10::IValue taken(const c10::IValue& value) {
    if (value.isTensor()) return taken(value.toTensor());
    if (!value.isTensorList()) return value;
    std::vector<at::Tensor> found;
    for (const at::Tensor& one : value.toTensorVector()) found.push_back(taken(one));
    return found;
  }
};

template <typename Function> void each_tensor(const c10::IValue& value, const Function& function) {
  if (value.isTensor()) function(value.toTensor());
  if (value.isTensorList()) for (const at::Tensor& one : value.toTensorVector()) function(one);
}

const std::set<std::string> WAIT{ // for the device: how large their results are is a matter of values
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::equal", "aten::bincount"};

bool waits(const c10::OperatorHandle& op, const torch::jit::Stack& arguments) {
  const auto& name = op.operator_name().name;
  if (WAIT.count(name)) return true;
  if (name == "aten::repeat_interleave") return arguments.back().isNone();
  if (name.find("index") == std::string::npos) return false;
  if (name.find("index_put") != std::string::npos) { // what is masked is filled with one number of the host's
    const auto& value = arguments[2].toTensor();
    if (value.is_cpu() && value.numel() == 1 && !arguments[3].toBool()) return false;
  }
  for (const c10::IValue& one : arguments) {
    if (!one.isList() || one.toList().elementType()->kind() != c10::TypeKind::OptionalType) continue;
    for (const c10::IValue& index : one.toListRef()) {
      if (index.isTensor() && (index.toTensor().dtype() == at::kBool || index.toTensor().dtype() == at::kByte)) return true;
    }
  }
  return false;
}

// -- Workspaces: cuBLAS's and cuBLASLt's, which each takes with its first product in a thread and on a stream, and keeps ----

std::mutex products;
std::map<std::tuple<std::thread::id, c10::StreamId, bool>, c10::DataPtr> workspaces; // true: cuBLASLt's

void take_workspace(const c10::OperatorHandle& op) {
  static const std::set<std::string> LIBRARYS{
      "aten::addmm", "aten::addmm_", "aten::mm", "aten::bmm", "aten::baddbmm", "aten::baddbmm_", "aten::addmv", "aten::addmv_"};
  const auto& name = op.operator_name().name;
  if (!LIBRARYS.count(name)) return;
  const bool with_bias = name == "aten::addmm";
  std::lock_guard<std::mutex> held(products);
  auto& own = workspaces[{std::this_thread::get_id(), current_stream, with_bias}];
  if (!own) own = memory.allocate(with_bias ? 1 << 20 : 8519680);
}

void clear_workspaces() {
  std::lock_guard<std::mutex> held(products);
  workspaces.clear();
}

// What is returned has the sizes and strides that the op gives to zeros in the place of its arguments.
void record(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  recording->permits(!waits(op, {stack->begin() + begin, stack->end()}), op.operator_name().name);
  Call later{op}, now{op, /*zeros=*/true};
  torch::jit::Stack given;
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[begin + i];
    given.push_back(later.given(arguments[i], value));
    value = now.given(arguments[i], value);
  }
  RandomState draws_nothing = *now.state;
  {
    std::optional<Drawing> drawing;
    recording->permits(!now.draws || recording->states.count(now.state), "numbers of an unregistered generator");
    if (now.draws) drawing.emplace(draws_nothing);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> grown; // `out=` of another size, and where that lies on the device
  for (size_t i = 0; i < now.pairs.size(); i++) {
    if (now.pairs[i].cpu.sizes() == now.pairs[i].own.sizes()) continue;
    now.becomes(now.pairs[i]);
    grown.emplace_back(later.pairs[i].cpu, on_cpu(now.pairs[i].own));
  }
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) (*stack)[i] = now.taken((*stack)[i]);

  std::vector<at::Tensor> made;
  for (const at::Tensor& one : now.made) made.push_back(one.defined() ? on_cpu(one) : at::Tensor());
  for (const auto& [own, cpu] : later.pairs) if (cpu.numel()) recording->addresses.push_back(cpu.storage().data());
  for (const auto& [cpu, memory] : grown) recording->addresses.push_back(memory.storage().data());
  for (const at::Tensor& one : made) if (one.defined() && one.numel()) recording->addresses.push_back(one.storage().data());
  recording->steps.push_back([op, given, made, grown, state = now.draws ? now.state : nullptr] {
    at::AutoDispatchBelowADInplaceOrView below;
    torch::jit::Stack stack = given;
    {
      std::optional<Drawing> drawing;
      if (state) drawing.emplace(*state);
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    }
    auto to = made.begin();
    for (const c10::IValue& value : stack) {
      each_tensor(value, [&to](const at::Tensor& one) {
        if (!one.defined()) return;
        const at::Tensor& memory = *to++;
        if (memory.defined()) write(memory, one);
      });
    }
    for (const auto& [cpu, memory] : grown) write(memory, cpu);
  });
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  take_workspace(op);
  if (recording) return record(op, stack);
  Call call{op};
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); i++) {
    auto& value = (*stack)[begin + i];
    value = call.given(arguments[i], value);
  }
  {
    std::optional<Drawing> drawing;
    if (call.draws) drawing.emplace(*call.state);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  call.resized();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); i++) {
    (*stack)[i] = call.taken((*stack)[i]);
  }
}

caffe2::TypeMeta dtype_of(std::optional<at::ScalarType> dtype) {
  return dtype ? c10::scalarTypeToTypeMeta(*dtype) : at::get_default_dtype();
}

at::Tensor empty_strided(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<Device>, std::optional<bool>) {
  return empty(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), dtype_of(dtype));
}

at::Tensor empty_memory_format(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  auto made = empty(shape, c10::contiguous_strides(shape), dtype_of(dtype));
  if (format && *format != at::MemoryFormat::Contiguous) made.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return made;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool) {
  if (self.is_same(source)) return self;
  at::Tensor to = self.is_cuda() ? on_cpu(self) : self;
  const at::Tensor from = source.is_cuda() ? on_cpu(source) : source;
  at::AutoDispatchBelowADInplaceOrView below;
  if (!recording) {
    to.copy_(from);
    return self;
  }
  recording->permits(self.is_cuda() && source.is_cuda(), "a copy to the host or from it");
  for (const at::Tensor& one : {to, from}) if (one.numel()) recording->addresses.push_back(one.storage().data());
  recording->steps.push_back([to, from]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  at::Tensor written = to;
  copy_(written, self, false);
  return to;
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  const auto shape = C10_AS_INTARRAYREF_SLOW(sizes);
  if (self.sizes() == shape) return self;
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(shape);
  auto* storage = self.storage().unsafeGetStorageImpl();
  const size_t nbytes = at::detail::computeStorageNbytesContiguous(shape, self.itemsize(), self.storage_offset());
  if (nbytes > storage->nbytes()) {
    auto data = memory.allocate(nbytes);
    if (storage->nbytes()) memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(nbytes);
  }
  if (format == at::MemoryFormat::ChannelsLast || format == at::MemoryFormat::ChannelsLast3d) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_strided(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), offset.guard_int(__FILE__, __LINE__));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const int64_t numel = source.nbytes() / self.itemsize();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  return set_tensor(self, empty({0}, {1}, self.dtype()));
}

bool is_pinned(const at::Tensor&, std::optional<Device>) {
  return false;
}

const std::set<std::string> OWN{
    "aten::empty.memory_format", "aten::empty_strided", "aten::copy_", "aten::_copy_from", "aten::resize_", "aten::set_",
    "aten::set_.source_Storage_storage_offset", "aten::set_.source_Storage", "aten::set_.source_Tensor", "aten::is_pinned"};

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty_memory_format);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("resize_", resize_);
  m.impl("set_", set_empty);
  m.impl("set_.source_Storage_storage_offset", set_strided);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("is_pinned", is_pinned);
  for (const char* name : {"convolution", "_convolution", "convolution_backward"}) { // CUDA has kernels of its own to choose from
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

// Ops that have a kernel for the CPU have it here, and not what torch composes where a device has none.
void start() {
  c10::SetAllocator(DeviceType::CUDA, &memory);
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CPU)) {
    const auto words = c10::toString(name);
    const auto op = dispatcher.findOp(name);
    if (name.name.rfind("aten::", 0) != 0 || OWN.count(words) || !op) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd)) continue;
    library.impl(words.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

} // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}
namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}

PYBIND11_MODULE(simulated_device, m) {
  m.def("start", &start);
  m.def("default_generator", &default_generator);
  m.def("set_limit", [](int64_t nbytes) { limit = nbytes; });
  m.def("reset_peak", &reset_peak);
  m.def("statistics", &statistics);
  m.def("blocks", &all_blocks);
  m.def("is_recording", [] { return recording != nullptr; });
  m.def("wait", &wait);
  m.def("clear_workspaces", &clear_workspaces);
  pybind11::class_<Graph>(m, "Graph")
      .def(pybind11::init<>())
      .def("begin", &Graph::begin)
      .def("end", &Graph::end)
      .def("replay", &Graph::replay)
      .def("reset", &Graph::reset)
      .def("register", [](Graph& graph, const at::Generator& generator) { graph.states.insert(state_of(generator)); });
}
