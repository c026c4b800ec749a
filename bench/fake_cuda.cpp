// A CUDA device for a CPU build of torch: one GPU, one stream, no memory and no kernels. Enough for autograd over fake
// tensors (FakeTensorMode), which compute shapes and dtypes and nothing else. Preloaded by fake_cuda.py.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device gpu(c10::DeviceType::CUDA, 0);
const c10::Stream stream(c10::Stream::DEFAULT, gpu);

// autograd asks the guard for the stream of each operator, and waits for it between streams
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return gpu.type(); }
  c10::Device exchangeDevice(c10::Device) const override { return gpu; }
  c10::Device getDevice() const override { return gpu; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream; }
  c10::Stream getDefaultStream(c10::Device) const override { return stream; }
  c10::Stream getNewStream(c10::Device, int) const override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

// what torch asks before it lets a tensor be on the GPU
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

Guard guard;
c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);

}  // namespace

namespace at {
using ::CUDAHooks;      // torch looks for this name
REGISTER_CUDA_HOOKS(CUDAHooks)

namespace accelerator {     // in place of libtorch's, which looks for a CUDA build
std::optional<c10::DeviceType> getAccelerator(bool) { return gpu.type(); }
}  // namespace accelerator
}  // namespace at
