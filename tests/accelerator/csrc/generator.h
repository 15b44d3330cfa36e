// A device's random number generator: a seed and an offset, which the host advances when it enqueues a random operation.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <mutex>

namespace emu {

struct Generator final : c10::GeneratorImpl {
  static constexpr int64_t kStateBytes = 16;

  explicit Generator(int device);
  void set_current_seed(uint64_t seed) override;
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

  // A CPU generator for the next random operation. As on CUDA, drawing never waits for the device.
  at::Generator next();

 private:
  Generator* clone_impl() const override;
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(int device);

}  // namespace emu
