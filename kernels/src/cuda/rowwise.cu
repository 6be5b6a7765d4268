#include "prelude.cuh"

// x[i] *= factor. One thread an element.
extern "C" __global__ void scale(float *x, float factor, u32 count) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) x[i] *= factor;
}
