// Tensors of up to two dimensions read and written run by run, whatever their dtype and strides.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace grpo_kernels {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <typename T>
inline constexpr ScalarType dtype_of =
    std::is_same_v<T, double> ? ScalarType::Double : ScalarType::Float;

// An uninitialised CPU tensor, straight from the allocator: no dispatcher on the way.
template <size_t Dims>
Tensor empty(const std::array<int64_t, Dims>& sizes, ScalarType dtype) {
  std::array<int64_t, Dims> strides{};
  int64_t stride = 1;
  for (size_t dim = Dims; dim-- > 0; stride *= sizes[dim]) strides[dim] = stride;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      Dims,
      sizes.data(),
      strides.data(),
      static_cast<int32_t>(dtype),
      aoti_torch_device_type_cpu(),
      0,
      &handle));
  return Tensor(handle);
}

// Calls use(pointer) with `data` as a pointer to what `dtype` says.
template <typename Use>
void with_pointer(const void* data, ScalarType dtype, const Use& use) {
  switch (dtype) {
    case ScalarType::Float:
      return use(static_cast<const float*>(data));
    case ScalarType::Double:
      return use(static_cast<const double*>(data));
    case ScalarType::BFloat16:
      return use(static_cast<const torch::headeronly::BFloat16*>(data));
    case ScalarType::Half:
      return use(static_cast<const torch::headeronly::Half*>(data));
    case ScalarType::Long:
      return use(static_cast<const int64_t*>(data));
    case ScalarType::Int:
      return use(static_cast<const int32_t*>(data));
    case ScalarType::Bool:
      return use(static_cast<const bool*>(data));
    default:
      STD_TORCH_CHECK(false, "grpo_kernels_cpp: unsupported dtype ", dtype);
  }
}

// A [rows, columns] tensor, or a [rows] one that is the same for all columns; or none at all.
class StridedInput {
 public:
  StridedInput() = default;

  explicit StridedInput(const Tensor& tensor)
      : present_(true),
        data_(static_cast<const char*>(tensor.const_data_ptr())),
        dtype_(tensor.scalar_type()),
        element_size_(tensor.element_size()),
        row_stride_(tensor.stride(0)),
        column_stride_(tensor.dim() == 2 && tensor.size(1) != 1 ? tensor.stride(1) : 0) {}

  static StridedInput of_scalar(const Tensor& tensor) {
    StridedInput out;
    out.present_ = true;
    out.data_ = static_cast<const char*>(tensor.const_data_ptr());
    out.dtype_ = tensor.scalar_type();
    out.element_size_ = tensor.element_size();
    return out;
  }

  ScalarType dtype() const {
    return dtype_;
  }

  bool present() const {
    return present_;
  }

  // The one element of a scalar.
  double number() const {
    double out = 0;
    with_pointer(data_, dtype_, [&](const auto* from) { out = static_cast<double>(*from); });
    return out;
  }

  // [begin, begin + count) of a row as contiguous T: in place where it is that, else in scratch.
  template <typename T>
  const T* read(int64_t row, int64_t begin, int64_t count, T* scratch) const {
    if (!present_) return nullptr;
    const char* start = data_ + (row * row_stride_ + begin * column_stride_) * element_size_;
    const T* out = scratch;
    with_pointer(start, dtype_, [&](const auto* from) {
      using From = std::remove_cvref_t<decltype(*from)>;
      if constexpr (std::is_same_v<From, T>) {
        if (column_stride_ == 1 || count == 1) {
          out = from;
          return;
        }
      }
      if (column_stride_ == 0)
        std::fill_n(scratch, count, static_cast<T>(*from));
      else if (column_stride_ == 1)
        for (int64_t i = 0; i < count; ++i) scratch[i] = static_cast<T>(from[i]);
      else
        for (int64_t i = 0; i < count; ++i) scratch[i] = static_cast<T>(from[i * column_stride_]);
    });
    return out;
  }

 private:
  bool present_ = false;  // an empty tensor is present, though it has no data
  const char* data_ = nullptr;
  ScalarType dtype_ = ScalarType::Float;
  int64_t element_size_ = 0, row_stride_ = 0, column_stride_ = 0;
};

// A fresh contiguous [rows, columns] gradient in the dtype of the input it belongs to; or none.
struct StridedOutput {
  std::optional<Tensor> tensor;

  StridedOutput(bool wanted, const StridedInput& like, int64_t rows, int64_t columns)
      : columns_(columns) {
    if (!wanted) return;
    dtype_ = like.dtype();
    tensor = empty<2>({rows, columns}, dtype_);
    data_ = tensor->mutable_data_ptr();
  }

  // Where the kernel puts a run: in place where the dtype is T, else in scratch.
  template <typename T>
  T* place(int64_t row, int64_t begin, T* scratch) const {
    if (!data_) return nullptr;
    return dtype_ == dtype_of<T> ? static_cast<T*>(data_) + row * columns_ + begin : scratch;
  }

  // Carry a run that was put in scratch to its place.
  template <typename T>
  void write(int64_t row, int64_t begin, int64_t count, const T* from) const {
    if (!data_ || dtype_ == dtype_of<T>) return;
    with_pointer(data_, dtype_, [&](const auto* base) {
      using To = std::remove_cvref_t<decltype(*base)>;
      To* to = const_cast<To*>(base) + row * columns_ + begin;
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<To>(from[i]);
    });
  }

 private:
  void* data_ = nullptr;
  ScalarType dtype_ = ScalarType::Float;
  int64_t columns_;
};

}  // namespace grpo_kernels
