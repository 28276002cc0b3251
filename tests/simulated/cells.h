// Recurrent cells as CUDA has them: gates in one kernel, and what its backward reads beside what is returned.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <tuple>

namespace simulated {

using Given = std::optional<at::Tensor>;

at::Tensor with_bias(const at::Tensor& gates, const Given& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

at::Tensor or_zeros(const Given& gradient, const at::Tensor& like) {
  return gradient && gradient->defined() ? *gradient : at::zeros_like(like);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& cell, const Given& input_bias, const Given& hidden_bias) {
  const auto gates = (with_bias(input, input_bias) + with_bias(hidden, hidden_bias)).chunk(4, 1);
  const auto i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  const auto next = f * cell + i * g;
  return {o * next.tanh(), next, at::cat({i, f, g, o}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const Given& of_output, const Given& of_next, const at::Tensor& cell, const at::Tensor& next, const at::Tensor& workspace,
    bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const auto &i = gates[0], &f = gates[1], &g = gates[2], &o = gates[3];
  const auto output = or_zeros(of_output, next), squashed = next.tanh();
  const auto through = or_zeros(of_next, next) + output * o * (1 - squashed * squashed);
  const auto made = at::cat(
      {through * g * i * (1 - i), through * cell * f * (1 - f), through * i * (1 - g * g), output * squashed * o * (1 - o)}, 1);
  return {made, through * f, has_bias ? made.sum(0) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input, const at::Tensor& hidden, const at::Tensor& before, const Given& input_bias, const Given& hidden_bias) {
  const auto in = with_bias(input, input_bias).chunk(3, 1), recurrent = with_bias(hidden, hidden_bias).chunk(3, 1);
  const auto r = (in[0] + recurrent[0]).sigmoid(), z = (in[1] + recurrent[1]).sigmoid();
  const auto n = (in[2] + r * recurrent[2]).tanh();
  return {n + z * (before - n), at::cat({r, z, n, before, recurrent[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& gradient, const at::Tensor& workspace, bool has_bias) {
  const auto kept = workspace.chunk(5, 1);
  const auto &r = kept[0], &z = kept[1], &n = kept[2], &before = kept[3], &recurrent = kept[4];
  const auto of_n = gradient * (1 - z) * (1 - n * n);
  const auto of_z = gradient * (before - n) * z * (1 - z), of_r = of_n * recurrent * r * (1 - r);
  const auto of_input = at::cat({of_r, of_z, of_n}, 1), of_hidden = at::cat({of_r, of_z, of_n * r}, 1);
  return {
      of_input, of_hidden, gradient * z, has_bias ? of_input.sum(0) : at::Tensor(), has_bias ? of_hidden.sum(0) : at::Tensor()};
}

} // namespace simulated
