// Loaded before torch: its CPU build has no accelerator, and autograd asks for one where a gradient is on another device.
#include <ATen/DeviceAccelerator.h>

namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool /*checked*/) {
  return c10::DeviceType::CUDA;
}
} // namespace at::accelerator
