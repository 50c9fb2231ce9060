// The device code of an epilogue (blocks/epilogue.py): what happens to one output of a product before it is stored.
//
// A kernel applies the steps that epilogue_cuda.py writes into the macro EPILOGUE, for example
//     output.bias(); output.activation<GELU>(); output.scale(0.5f); output.residual();
// Nothing here knows how the product was tiled.

#pragma once

#include "constants.cuh"
#include "elements.cuh"
#include "ptx.cuh"

#ifndef EPILOGUE
#define EPILOGUE
#endif
#ifndef BIAS_TYPE
#define BIAS_TYPE float
#endif
#ifndef RESIDUAL_TYPE
#define RESIDUAL_TYPE float
#endif

enum ActivationKind { GELU, GELU_TANH, RELU, SILU, SQUARED_RELU, GPT_OSS };

__device__ inline float sigmoid(float x) { return 1.f / (1.f + exp2_approx(-LOG2E * x)); }

// P(Z > a) of a standard normal for a >= 0: 2^-p(a), where p is fitted to float32 accuracy on [0, 6].
__device__ inline float normal_tail(float a) {
    float p = 2.01481498152134e-08f * a - 6.263879299694963e-07f;
    p = p * a + 8.360007996088825e-06f;
    p = p * a - 6.053904871805571e-05f;
    p = p * a + 2.2215439821593463e-04f;
    p = p * a + 1.2529618106782436e-04f;
    p = p * a - 7.107788696885109e-03f;
    p = p * a + 5.25551438331604e-02f;
    p = p * a + 4.591823220252991e-01f;
    p = p * a + 1.1511086225509644f;
    return exp2_approx(-1.f - p * a);
}

template <ActivationKind KIND>
__device__ inline float activate(float x, float alpha = 1.f) {
    const float positive = x < 0.f ? 0.f : x;  // keeps NaN
    if (KIND == GELU) {  // x P(Z < x)
        const float tail = normal_tail(fabsf(x));
        return x * (x < 0.f ? tail : 1.f - tail);
    }
    if (KIND == GELU_TANH)  // (1 + tanh z) / 2 = sigmoid(2 z)
        return x * sigmoid(x * (1.5957691216057308f + 0.07135481282938f * x * x));
    if (KIND == RELU) return positive;
    if (KIND == SILU) return x * sigmoid(x);
    if (KIND == SQUARED_RELU) return positive * positive;
    return x * sigmoid(alpha * x);  // GPT_OSS
}

// One output in float32, the up product beside it where there is a gate, and where its operands lie.
struct Output {
    float value, up;
    const BIAS_TYPE* bias_at;
    const BIAS_TYPE* up_bias_at;
    const RESIDUAL_TYPE* residual_at;
    bool gated;

    __device__ inline void bias() {
        value += to_float(*bias_at);
        if (gated) up += to_float(*up_bias_at);
    }
    template <ActivationKind KIND>
    __device__ inline void activation() {
        value = activate<KIND>(value);
    }
    template <ActivationKind KIND>
    __device__ inline void gate(float alpha, float limit) {
        if (KIND == GPT_OSS) {  // both are clamped, and 1 is added to up; NaN stays
            value = value > limit ? limit : value;
            up = (up > limit ? limit : up < -limit ? -limit : up) + 1.f;
        }
        value = activate<KIND>(value, alpha) * up;
    }
    __device__ inline void scale(float factor) { value *= factor; }
    __device__ inline void residual() { value += to_float(*residual_at); }
};
