// A device with the CPU's memory and kernels whose tensors mix with those of the CPU as little as an accelerator's.
//
// Every operator is carried out by the CPU over the same memory, and its results are of the device again. What an
// accelerator refuses is refused: tensors of both places in one operator. What a host waits for is written down.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <mutex>
#include <set>

namespace {

using at::Tensor;
using std::optional;

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(TYPE, 0);
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

std::mutex lock;
std::vector<std::string> waits;  // what the host waited for, in order
std::set<const void*> pinned;
bool has_float64 = true;  // Apple's accelerators have none

void check(at::ScalarType type) {
  TORCH_CHECK_TYPE(has_float64 || type != at::kDouble, "this device has no float64");
}

void wait_for(const std::string& what) {
  std::lock_guard<std::mutex> guard(lock);
  waits.push_back(what);
}

// -- memory, and the one device and stream there are ------------------------------------------------------------------

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(size);
    return {data, data, &c10::free_cpu, DEVICE};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
Memory memory;
REGISTER_ALLOCATOR(TYPE, &memory);

void unpin(void* data) {
  std::lock_guard<std::mutex> guard(lock);
  pinned.erase(data);
  c10::free_cpu(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(size);
    std::lock_guard<std::mutex> guard(lock);
    pinned.insert(data);
    return {data, data, &unpin, c10::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
PinnedMemory pinned_memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait_for("synchronize"); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(lock);
    return pinned.count(data) > 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

// -- the same memory, seen from either side ---------------------------------------------------------------------------

bool is_there(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

Tensor seen_from(c10::Device device, const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() == device.type()) return tensor;
  if (device.type() == TYPE) check(tensor.scalar_type());
  return at::for_blob(tensor.data_ptr(), tensor.sizes())
      .strides(tensor.strides())
      .deleter([tensor](void*) {})
      .options(tensor.options().device(device).requires_grad(false))
      .target_device(device)
      .make_tensor();
}
Tensor here(const Tensor& tensor) { return seen_from(at::kCPU, tensor); }
Tensor there(const Tensor& tensor) { return seen_from(DEVICE, tensor); }

// -- every operator ---------------------------------------------------------------------------------------------------

// The host has to know what they give, or how much of it there is.
const std::set<std::string> ASKING = {
    "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::masked_select",     "aten::nonzero",
    "aten::unique_consecutive",  "aten::unique_dim", "aten::_unique2", "aten::repeat_interleave",
};

class Arguments {
 public:
  Arguments(const c10::FunctionSchema& schema, torch::jit::Stack* stack)
      : schema_(schema), stack_(stack), count_(schema.arguments().size()) {
    given_.assign(stack->end() - count_, stack->end());
  }

  void see_from_here() {
    for (size_t i = 0; i < count_; ++i) {
      auto& value = (*stack_)[stack_->size() - count_ + i];
      const auto& argument = schema_.arguments()[i];
      if (value.isTensor() && argument.kwarg_only() && is_written(argument) && value.toTensor().numel() == 0) {
        value = at::empty({0}, value.toTensor().options().device(at::kCPU));  // an output that may have to grow
        grown_.emplace_back(i, value.toTensor());
      } else if (value.isTensor()) {
        value = one(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (const Tensor& tensor : value.toTensorList().vec()) list.push_back(one(tensor));
        value = c10::IValue(list);
      } else if (value.isOptionalTensorList()) {
        c10::List<optional<Tensor>> list;
        for (const auto& tensor : value.toOptionalTensorList().vec())
          list.push_back(tensor ? optional<Tensor>(index(*tensor)) : tensor);
        value = list;
      } else if (value.isDevice()) {
        value = c10::Device(at::kCPU);
      }
    }
    if (ASKING.count(schema_.name())) wait_for(schema_.name());
  }

  void hand_back() {
    for (auto& [i, made] : grown_) {
      const Tensor& own = given_[i].toTensor();
      own.resize_(made.sizes());
      here(own).copy_(made);
    }
    const auto& returns = schema_.returns();
    for (size_t i = 0; i < returns.size(); ++i) {
      auto& value = (*stack_)[stack_->size() - returns.size() + i];
      if (is_written(returns[i])) {
        value = written(returns[i]);
      } else if (value.isTensor()) {
        value = there(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<Tensor> list;
        for (const Tensor& tensor : value.toTensorList().vec()) list.push_back(there(tensor));
        value = c10::IValue(list);
      }
    }
  }

 private:
  static bool is_written(const c10::Argument& argument) {
    return argument.alias_info() && argument.alias_info()->isWrite();
  }

  Tensor one(const Tensor& tensor) {
    const bool fits = !tensor.defined() || is_there(tensor) || tensor.dim() == 0;
    TORCH_CHECK(fits, "Expected all tensors to be on the same device: ", schema_.name(), " got one on the CPU");
    return here(tensor);
  }

  static Tensor index(const Tensor& tensor) {
    if (tensor.defined() && !is_there(tensor)) wait_for("upload");  // an accelerator takes indices from the CPU, too
    return here(tensor);
  }

  c10::IValue written(const c10::Argument& result) {
    for (size_t i = 0; i < count_; ++i) {
      const auto& argument = schema_.arguments()[i];
      if (is_written(argument) && argument.alias_info()->beforeSets() == result.alias_info()->beforeSets())
        return given_[i];
    }
    TORCH_CHECK(false, schema_.name(), " hands back what it was not given");
  }

  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  size_t count_;
  std::vector<c10::IValue> given_;
  std::vector<std::pair<size_t, Tensor>> grown_;
};

void carry_out(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Arguments arguments(op.schema(), stack);
  arguments.see_from_here();
  op.callBoxed(stack);
  arguments.hand_back();
}

// -- operators that make, view and copy tensors -----------------------------------------------------------------------

Tensor empty(
    c10::SymIntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<at::Device>,
    optional<bool>, optional<at::MemoryFormat> format) {
  const auto type = c10::dtype_or_default(dtype);
  check(type);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, KEYS, type, format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, optional<at::ScalarType> dtype, optional<at::Layout>,
    optional<at::Device>, optional<bool>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  const auto type = c10::dtype_or_default(dtype);
  check(type);
  return at::detail::empty_strided_generic(sizes, strides, &memory, KEYS, type);
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, optional<c10::SymInt> at) {
  const auto offset = at ? optional<int64_t>(at->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset);
}

Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  if (is_there(self) && !is_there(to)) wait_for("to the CPU");
  if (!is_there(self) && is_there(to) && !(non_blocking && self.is_pinned())) wait_for("upload");
  here(to).copy_(here(self));
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  at::native::resize_output(to, self.sizes());
  return copy_from(self, to, false);
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto* impl = self.unsafeGetTensorImpl();
  const auto strides = c10::TensorType::contiguousStridesOf(sizes);
  const auto bytes =
      at::detail::computeStorageNbytes(sizes, strides, self.dtype().itemsize(), self.storage_offset());
  if (auto storage = impl->unsafe_storage(); bytes > storage.nbytes()) {
    auto larger = memory.allocate(bytes);
    if (storage.nbytes()) memory.copy_data(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(larger));
    storage.set_nbytes(bytes);
  }
  impl->set_sizes_and_strides(sizes, strides);
  return self;
}

// -- operators that go another way on a device of this kind -----------------------------------------------------------

int64_t plain_attention(
    const Tensor&, const Tensor&, const Tensor&, const optional<Tensor>&, double, bool, optional<double>, bool) {
  return 0;
}

Tensor convolution(
    const Tensor& input, const Tensor& weight, const optional<Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  const auto bias_here = bias ? optional<Tensor>(here(*bias)) : bias;
  return there(at::convolution_symint(
      here(input), here(weight), bias_here, stride, padding, dilation, transposed, output_padding, groups));
}

Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {  // of integers, too
  return there(at::histc(here(self).to(at::kFloat), bins, min, max).to(self.scalar_type()));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&carry_out>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("unfold", &unfold);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("resize_", &resize);
  library.impl("_fused_sdp_choice", &plain_attention);
  library.impl("convolution_overrideable", &convolution);
  library.impl("histc", &histc);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  module.def("refuse_float64", [] { has_float64 = false; });
  module.def("take_waits", [] {
    std::lock_guard<std::mutex> guard(lock);
    return std::exchange(waits, {});
  });
}
