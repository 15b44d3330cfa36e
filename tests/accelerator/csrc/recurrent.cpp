// The fused cells of LSTM and GRU, which PyTorch asks every accelerator for and the CPU does not have.
#include <ATen/ATen.h>
#include <torch/library.h>

namespace emu {

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor with_bias(const Tensor& gates, const Maybe& bias) {
  return bias.has_value() && bias->defined() ? gates + *bias : gates;
}

Tensor bias_gradient(const Tensor& gates, bool has_bias) { return has_bias ? gates.sum(0) : Tensor(); }

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input, const Tensor& hidden, const Tensor& cell,
                                             const Maybe& input_bias, const Maybe& hidden_bias) {
  const auto gates = (with_bias(input, input_bias) + with_bias(hidden, hidden_bias)).chunk(4, 1);
  const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), fresh = gates[2].tanh(), out = gates[3].sigmoid();
  auto next = forget * cell + in * fresh;
  return {out * next.tanh(), next, at::cat({in, forget, fresh, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const Maybe& grad_hidden, const Maybe& grad_cell, const Tensor& cell,
                                                      const Tensor& next, const Tensor& workspace, bool has_bias) {
  if (!grad_hidden.has_value() && !grad_cell.has_value()) return {};
  const auto saved = workspace.chunk(4, 1);
  const auto &in = saved[0], &forget = saved[1], &fresh = saved[2], &out = saved[3];
  const auto gh = grad_hidden.has_value() && grad_hidden->defined() ? *grad_hidden : at::zeros_like(next);
  const auto shown = next.tanh();
  auto gc = gh * out * (1 - shown * shown);
  if (grad_cell.has_value() && grad_cell->defined()) gc = gc + *grad_cell;
  auto gates = at::cat({gc * fresh * in * (1 - in), gc * cell * forget * (1 - forget), gc * in * (1 - fresh * fresh),
                        gh * shown * out * (1 - out)},
                       1);
  return {gates, gc * forget, bias_gradient(gates, has_bias)};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input, const Tensor& hidden, const Tensor& before, const Maybe& input_bias,
                                    const Maybe& hidden_bias) {
  const auto from_input = with_bias(input, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden, hidden_bias).chunk(3, 1);
  const auto reset = (from_input[0] + from_hidden[0]).sigmoid();
  const auto keep = (from_input[1] + from_hidden[1]).sigmoid();
  const auto fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  return {fresh + keep * (before - fresh), at::cat({reset, keep, fresh, before, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad, const Tensor& workspace,
                                                                     bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const auto &reset = saved[0], &keep = saved[1], &fresh = saved[2], &before = saved[3], &candidate = saved[4];
  const auto of_fresh = grad * (1 - keep) * (1 - fresh * fresh);
  const auto of_keep = grad * (before - fresh) * keep * (1 - keep);
  const auto of_reset = of_fresh * candidate * reset * (1 - reset);
  auto input = at::cat({of_reset, of_keep, of_fresh}, 1);
  auto hidden = at::cat({of_reset, of_keep, of_fresh * reset}, 1);
  return {input, hidden, grad * keep, bias_gradient(input, has_bias), bias_gradient(hidden, has_bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
}

}  // namespace emu
