// Initial weights of scorers (KVpop, E.5).
#pragma once

#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/linear.hpp>
#include <kvpolicy/scorers/mlp.hpp>
#include <kvpolicy/scorers/mlstm.hpp>

#include <cstdint>

namespace kvpolicy {

/// The numbers of an mLSTM's start that the paper leaves open.
struct mLSTMStart {
    float noise = 0.01f;             ///< standard deviation on every projection and gate weight
    float forget_bias_first = 3.0f;  ///< b_f of the first head: half of a memory is gone after 14 tokens,
    float forget_bias_last = 6.0f;   ///< and of the last: after 280; evenly spaced between
    float input_bias = 0.0f;         ///< b_i; the read's quotient cancels it
};

/// Fills the arrays of `into` for a scorer of the sizes in `scorer`, whose own weights are not read. Null
/// arrays are left out, where the scorer can do without them. Wq and Wk start as the identity on the key's
/// first P numbers (in a row twice where P is larger), Wv as the identity on the value's, all plus noise; the
/// gates' weights as noise around 0 with biases that forget slowly; the norm's gain is 1; the score head and
/// the skip are 0, so that every key has the score 0 and the sparse policy starts from a neutral ranking (the
/// oldest keys win ties, unless a decay is set). The same seed gives the same numbers.
template <std::int32_t D, class Feature, class Values>
void initialize(const mLSTMScorer<D, Feature, Values>& scorer, mLSTMParameters<float> into,
                std::uint64_t seed, const mLSTMStart& start = {});

/// W1 normal with variance 1 / X, biases and the score head 0; b2 is 5 for SP-KV's predictor (HiddenInput),
/// whose gates start open.
template <class Input, class Act, std::int32_t D>
void initialize(const BasicMlpScorer<Input, Act, D>& scorer, MlpParameters<float> into, std::uint64_t seed);

/// The layers' weights normal with variance 2 / (3 C(l-1)), which keeps the size of activations through SiLU
/// roughly; biases and the readout 0, its bias ConvScorer::start_bias. So every r is sigmoid(1) = 0.73, and
/// LTE sparsifies from open gates (3.1.2). Without an array for the readout's bias every r is 0.5, and gates
/// start shut.
template <std::int32_t D>
void initialize(const ConvScorer<D>& scorer, ConvParameters<float> into, std::uint64_t seed);

/// All 0; the seed is for uniformity.
template <std::int32_t D>
void initialize(const LinearScorer<D>& scorer, LinearParameters<float> into, std::uint64_t seed);

}  // namespace kvpolicy

#include <kvpolicy/scorers/host/host_initialize.hpp>
